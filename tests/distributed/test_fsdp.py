"""FSDP on real processes: equal to one process, whole states, evaluation in step, checkpoints for any number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Stream, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, EvalPrediction, StepOutput, TaskModule, Trainer, TrainerCallback, set_seed
from hftrain.strategies.fsdp.strategy import FSDPStrategy

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """One of the repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x)).tanh()


class Deep(nn.Module):
    """Repeated layers, a weight that two layers share, a frozen one, and a buffer."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(8, 8)
        self.last.weight = self.blocks[0].mix.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x) * self.frozen + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.last(hidden))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class StopAt(TrainerCallback):
    """Save and stop at one step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def make_trainer(
    folder: str, *, rows: int = 24, stop: int | None = None, strategy: Any = None, precision: Any = None, **options: Any
) -> Trainer:
    set_seed(7)
    return Trainer(
        Deep(),
        make_arguments(Path(folder), **options),
        train_dataset=make_rows(rows),
        eval_dataset=make_rows(7, seed=2),
        callbacks=[StopAt(stop)],
        strategy=strategy,
        precision=precision,
    )


def told(trainer: Trainer) -> dict[str, Any]:
    """Return what a run logged, and what the model has learnt (in the main process)."""
    state = trainer.strategy.model_state(trainer.model_wrapped)
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {
        "history": [
            {name: entry[name] for name in names if name in entry}
            for entry in trainer.state.log_history
            if "train_loss" not in entry
        ],
        "weights": {name: value.flatten().tolist() for name, value in state.items()},
    }


def train(folder: str, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


def close(ours: dict[str, Any], theirs: dict[str, Any], rel: float = 1e-5) -> None:
    assert len(ours["history"]) == len(theirs["history"])
    for left, right in zip(ours["history"], theirs["history"], strict=True):
        assert left == pytest.approx(right, rel=rel, abs=1e-6)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, values in ours["weights"].items():
        assert values == pytest.approx(theirs["weights"][name], rel=rel, abs=1e-5), name


CLIPPED = {"max_grad_norm": 0.5, "eval_strategy": "epoch", "weight_decay": 0.1}
# 28 rows are 7 micro-steps of 4: with accumulation 3 the last step of an epoch is a short one.
ROWS = 28
CHOICES: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "offload": {"strategy": "fsdp_offload"},
    "full_shard": {"fsdp": "full_shard"},
    "full_shard auto_wrap": {"fsdp": "full_shard auto_wrap"},
    "shard_grad_op": {"fsdp": "shard_grad_op auto_wrap"},
    "no_shard": {"fsdp": "no_shard"},
    "hybrid_shard": {"fsdp": "hybrid_shard"},
    "offload auto_wrap": {"fsdp": "full_shard offload auto_wrap"},
    "by size": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 60, "forward_prefetch": True}},
    "recomputing": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": "Block"},
    },
}


def each_choice(folder: str) -> dict[str, Any]:
    answers = {
        f"{name} {accumulation}": train(
            f"{folder}/{name}", rows=ROWS, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation,
            **CLIPPED, **choice,
        )
        for name, choice in CHOICES.items()
        for accumulation in (1, 3)
    }  # fmt: skip
    ragged = {"rows": 25, "per_device_train_batch_size": 2, **CLIPPED}
    for strategy in ("ddp", "fsdp"):
        answers[f"ragged {strategy}"] = train(f"{folder}/ragged", strategy=strategy, **ragged)
    for precision in ("bf16", "fp16"):
        answers[precision] = train(f"{folder}/{precision}", strategy="fsdp", precision=precision, **ragged)
    return answers


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from support.distributed import launch

    folder = tmp_path_factory.mktemp("fsdp")
    ended = launch(everything, folder, kwargs={"folder": str(folder)}, timeout_s=500)
    assert ended.returncode == 0, ended.output
    return ended.results


def everything(folder: str) -> dict[str, Any]:
    return {"choices": each_choice(folder)}


@pytest.fixture(scope="module", params=[1, 3])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": request.param}
    return request.param, train(str(tmp_path_factory.mktemp("alone")), rows=ROWS, **options, **CLIPPED)


@pytest.mark.parametrize("choice", CHOICES)
def test_two_processes_train_like_one(two: list[Any], alone: tuple[int, dict[str, Any]], choice: str) -> None:
    accumulation, expected = alone
    first, second = (answer["choices"][f"{choice} {accumulation}"] for answer in two)
    assert first["history"] == second["history"]
    assert second["weights"] == {}
    assert max(entry.get("grad_norm", 0) for entry in expected["history"]) > 0.5, "else clipping would not be seen"
    close(first, expected)
