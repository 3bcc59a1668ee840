"""The guide's GaLore examples: its arguments word for word; a tiny model and own data in place of gemma and imdb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.optimizer_runs import Words, make_words, weights_of

from hftrain import ConfigError, Trainer, TrainingArguments

pytestmark = [pytest.mark.optimizers, pytest.mark.usefixtures("tmp_cwd")]


def train(args: TrainingArguments) -> Trainer:
    model = Words()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=make_words(),
    )
    before = weights_of(trainer)
    output = trainer.train()
    assert output.global_step == 100
    after = weights_of(trainer)
    assert [name for name in before if torch.equal(before[name].cpu(), after[name].cpu())] == []
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(loss == loss for loss in losses)
    return trainer


def ranks(trainer: Trainer) -> list[Any]:
    assert trainer.optimizer is not None
    return [
        (len(group["params"]), group["rank"], group["update_proj_gap"], group["scale"], group["proj_type"])
        for group in trainer.optimizer.param_groups
        if "rank" in group
    ]


PLAIN = [(3, 128, 200, 0.25, "std")]
EXTRA = {"optim_args": "rank=64, update_proj_gap=100, scale=0.10"}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("galore_adamw", {}, PLAIN),
        ("galore_adafactor", {}, PLAIN),
        ("galore_adamw_8bit", {}, PLAIN),
        ("galore_adamw", EXTRA, [(3, 64, 100, 0.1, "std")]),
        ("galore_adamw_layerwise", {}, None),
        ("galore_adafactor_layerwise", {}, None),
    ],
)
def test_guide_trains_with_galore(
    name: str, options: dict[str, Any], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    args = TrainingArguments(
        output_dir="./test-galore",
        max_steps=100,
        per_device_train_batch_size=2,
        optim=name,
        optim_target_modules=["attn", "mlp"],
        **options,
    )
    if name == "galore_adamw_8bit" and not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA"):
            train(args)
        return
    with caplog.at_level("WARNING", logger="hftrain"):
        found = ranks(train(args))
    assert found == expected if expected else len(found) == 1
    assert ("max_grad_norm=1.0" in caplog.text) is (expected is None)
    assert Path("test-galore").is_dir()
