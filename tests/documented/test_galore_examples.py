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


@pytest.mark.parametrize("name", ["galore_adamw", "galore_adafactor", "galore_adamw_8bit"])
def test_guide_trains_with_galore(name: str) -> None:
    args = TrainingArguments(
        output_dir="./test-galore",
        max_steps=100,
        per_device_train_batch_size=2,
        optim=name,
        optim_target_modules=["attn", "mlp"],
    )
    if name == "galore_adamw_8bit" and not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA devices only"):
            train(args)
        return
    assert ranks(train(args)) == [(3, 128, 200, 0.25, "std")]


def test_guide_trains_with_extra_arguments() -> None:
    args = TrainingArguments(
        output_dir="./test-galore",
        max_steps=100,
        per_device_train_batch_size=2,
        optim="galore_adamw",
        optim_target_modules=["attn", "mlp"],
        optim_args="rank=64, update_proj_gap=100, scale=0.10",
    )
    assert ranks(train(args)) == [(3, 64, 100, 0.1, "std")]


@pytest.mark.parametrize("name", ["galore_adamw_layerwise", "galore_adafactor_layerwise"])
def test_guide_trains_layer_by_layer(name: str, caplog: pytest.LogCaptureFixture) -> None:
    args = TrainingArguments(
        output_dir="./test-galore",
        max_steps=100,
        per_device_train_batch_size=2,
        optim=name,
        optim_target_modules=["attn", "mlp"],
    )
    with caplog.at_level("WARNING", logger="hftrain"):
        assert len(ranks(train(args))) == 1
    assert "max_grad_norm=1.0 has no effect" in caplog.text
    assert Path("test-galore").is_dir()
