"""The documented context managers around the loss, and which device's mixed precision is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows, make_trainer
from torch import nn

from hftrain import Trainer


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)])
def test_contexts_cast_as_the_precision_says(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    seen = []

    class Watch(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            layer, x = self.model.layers[0], inputs["x"]
            for context in (
                self.autocast_smart_context_manager(),
                self.autocast_smart_context_manager(cache_enabled=True),
                self.compute_loss_context_manager(),
            ):
                with context:
                    seen.append(layer(x).dtype)
            return super().training_step(model, inputs, num_items_in_batch)

    Watch(Net(), make_arguments(tmp_path, max_steps=1, **options), train_dataset=make_rows()).train()
    # Where a step is the user's own, the model's forward pass alone is cast: a loss around it is computed in float32.
    assert seen == [dtype, dtype, torch.float32]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_cpus_mixed_precision_trains_on_the_cpu(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, half_precision_backend="cpu_amp", max_steps=2, **{name: True})
    assert trainer.train().global_step == 2
    assert trainer.precision.policy.name == name


def test_older_name_of_the_backend_works(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="fp16_backend is deprecated"):
        arguments = make_arguments(tmp_path, fp16_backend="cpu_amp", fp16=True, max_steps=1)
    assert Trainer(Net(), arguments, train_dataset=make_rows()).train().global_step == 1
