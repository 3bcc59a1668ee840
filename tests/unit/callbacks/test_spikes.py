"""SpikeGuard: which steps are spikes, that a skipped one leaves no trace, and that a resumed run continues exactly."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import Signal, Stop, assert_same, outcome
from support.tiny import Net, StepEngine, make_rows, make_trainer

from hftrain import (
    EMA,
    ConfigError,
    GradientClipping,
    SavePolicy,
    SpikeGuard,
    StrategyError,
    TaskError,
    Trainer,
    TrainerCallback,
    set_seed,
)
from hftrain.checkpoint.manifest import DECLARED_OBJECTS
from hftrain.storage.tensors import load_containers
from hftrain.strategies import SingleDeviceStrategy

NUM_STEPS, SPIKES = 16, (9, 13)


class Spiky(Net):
    """Its loss is multiplied in some updates; the count is in a buffer, so a resume continues it."""

    def __init__(self, factor: float = 1000.0, at: tuple[int, ...] = SPIKES) -> None:
        super().__init__()
        self.factor, self.at = factor, at
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        found = super().forward(x, labels)
        if self.training:
            self.count += 1
            return (found[0] * (self.factor if int(self.count) in self.at else 1.0), *found[1:])
        return found


class States(TrainerCallback):
    """Note the optimizer's state and the weights after each step."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        moments = [v.clone() for s in kwargs["optimizer"].state.values() for v in s.values()]
        self.states.append([*moments, *(p.detach().clone() for p in kwargs["model"].parameters())])


class LowScale(SingleDeviceStrategy):
    """Scales the loss in fp16 so little that no spike overflows: the precision would skip it first."""

    def scaler_factory(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, init_scale=16.0)


def make(folder: Path, *callbacks: Any, model: Any = None, precision: Any = None, **options: Any) -> Trainer:
    set_seed(3)
    arguments = {
        "max_steps": NUM_STEPS,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "per_device_train_batch_size": 8,
        **options,
    }
    parts = {"strategy": LowScale(use_cpu=True), "train_dataset": make_rows(64), **arguments}
    return make_trainer(folder, model or Spiky(), *callbacks, precision=precision, **parts)  # type: ignore[no-any-return]


def guard(on_spike: str = "skip") -> SpikeGuard:
    return SpikeGuard(on_spike, rolling_interval_length=8, sigma_factor=20)


def listed(trainer: Trainer) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if "spike_loss" in entry]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_skipped_updates_leave_no_trace(tmp_path: Path, precision: str, max_grad_norm: float) -> None:
    states = States()
    trainer = make(tmp_path, guard(), states, precision=precision, max_grad_norm=max_grad_norm)
    trainer.train()
    assert listed(trainer) == [*SPIKES]
    for step in SPIKES:
        assert_same(states.states[step - 1], states.states[step - 2])
    assert not torch.equal(states.states[SPIKES[0]][-1], states.states[SPIKES[0] - 1][-1])
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert len(set(rates)) == NUM_STEPS  # the schedule moved on


@pytest.mark.parametrize("is_first", [False, True], ids=["clipping, guard", "guard, clipping"])
def test_norms_of_group_clipping_count_in_any_order(tmp_path: Path, is_first: bool) -> None:
    callbacks: list[Any] = [GradientClipping("group", 0.5), guard("warn")]
    trainer = make(tmp_path, *(callbacks[::-1] if is_first else callbacks), max_grad_norm=0.0)
    trainer.train()
    norms = [entry["spike_grad_norm"] for entry in trainer.state.log_history if "spike_loss" in entry]
    assert len(norms) == 2
    assert min(norms) > 100


def test_nan_is_a_spike_and_a_new_level_ends_being_one(tmp_path: Path) -> None:
    trainer = make(tmp_path / "nan", guard(), model=Spiky(float("nan"), (10,)), logging_nan_inf_filter=False)
    trainer.train()
    assert listed(trainer) == [10]
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    level = make(tmp_path / "level", guard(), model=Spiky(100.0, tuple(range(8, 30))))
    level.train()
    assert listed(level)[0] == 8
    assert NUM_STEPS not in listed(level)


def test_overflow_is_left_to_the_loss_scale(tmp_path: Path) -> None:
    trainer = make(tmp_path, guard(), model=Spiky(1e6), precision="fp16")
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss_scale" in entry][-1]
    assert listed(trainer) == []
    assert (last["skipped_steps"], last["loss_scale"]) == (2, 4.0)


class Loud(Net):
    """Its loss grows with the largest input, so a spike comes from its batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        loss, *rest = super().forward(x, labels)
        return (loss * x.abs().max().clamp(min=10.0), *rest)


LOUD = {"train_sampling_strategy": "sequential", "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}


def make_loud(folder: Path, *callbacks: Any, at: tuple[int, ...] = SPIKES, **options: Any) -> Trainer:
    set_seed(3)
    rows = make_rows(8 * NUM_STEPS)
    for step in at:
        rows[8 * step - 3] = {**rows[0], "x": torch.full((4,), 1e4)}
    policy = SavePolicy(save_async=options.pop("save_async", False))
    return make(folder, *callbacks, model=Loud(), train_dataset=rows, save_policy=policy, **{**LOUD, **options})


def test_rewinding_leaves_out_all_samples_since_the_checkpoint(tmp_path: Path) -> None:
    """By a hand-written loop: 6 steps, none with the batches 7 to 9, then the rates and batches of the steps 10 on."""
    trainer = make_loud(tmp_path, guard("rewind"), at=(9,), lr_scheduler_type="linear")
    trainer.train()
    assert listed(trainer) == [9]
    model, rows = (make_loud(tmp_path / "hand", at=(9,)).model, trainer.train_dataset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in (*range(6), *range(9, NUM_STEPS)):
        optimizer.param_groups[0]["lr"] = 0.01 * (NUM_STEPS - step) / NUM_STEPS
        batch = rows[8 * step : 8 * step + 8]
        x, labels = torch.stack([row["x"] for row in batch]), torch.tensor([row["labels"] for row in batch])
        model(x, labels)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_rewinding_takes_averages_back_and_is_told_in_the_journal(tmp_path: Path) -> None:
    average = EMA(decay=0.5)
    make_loud(tmp_path, guard("rewind"), average, at=(9,), max_steps=9, save_steps=6).train()
    kept, last = (load_containers(tmp_path / f"checkpoint-{step}" / DECLARED_OBJECTS) for step in (6, 9))
    (name,) = (name for name in kept if name.endswith("EMA.averages"))
    assert_same(last[name], kept[name])
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["entry"]["step"] for line in lines if "spike_loss" in line.get("entry", {})] == [9]


@pytest.mark.parametrize(
    ("cuts", "stop", "is_first", "options"),
    [
        ((8, 9), Stop, False, {}),
        ((10, 11), Signal, True, {"fp16": True}),
        ((8, 9), Signal, True, {"save_async": True}),
        ((10, 11), Stop, False, {"save_async": True}),
    ],
)
def test_a_rewound_run_continues_exactly_twice(
    tmp_path: Path, cuts: tuple[int, int], options: dict[str, Any], stop: Any, is_first: bool
) -> None:
    """Each stop saves a checkpoint that the whole run does not have, and none goes back to."""
    make = partial(make_loud, save_total_limit=1, **options)
    whole = make(tmp_path / "whole", guard("rewind"))
    whole.train()
    assert listed(whole) == [*SPIKES]
    for at in (*cuts, None):
        run = make(tmp_path / "parts", *[guard("rewind"), stop(at)][:: -1 if is_first else 1])
        with pytest.raises(SystemExit) if stop is Signal and at else nullcontext():
            run.train(resume_from_checkpoint=at != cuts[0])
    assert_same(outcome(run), outcome(whole))


def test_a_spike_before_the_first_checkpoint_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewound = make_loud(tmp_path / "a", guard("rewind"), save_steps=10, at=(9,))
    rewound.train()
    assert "Step 9 has no checkpoint to go back to yet" in caplog.text
    skipped = make_loud(tmp_path / "b", guard("skip"), save_steps=10, at=(9,))
    skipped.train()
    assert_same(outcome(rewound), outcome(skipped))


def test_a_fourth_spike_after_one_checkpoint_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"step 12, .* checkpoint-8 3 times"):
        make_loud(tmp_path, guard("rewind"), save_steps=8, at=(9, 10, 11, 12)).train()


@pytest.mark.parametrize("options", [{"save_strategy": "no"}, {"save_only_model": True}])
def test_runs_without_whole_checkpoints_cannot_rewind(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Cannot use SpikeGuard"):
        make_loud(tmp_path, guard("rewind"), **options).train()


@pytest.mark.parametrize("settings", [{"on_spike": "stop"}, {"rolling_interval_length": 1}, {"sigma_factor": 0.0}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SpikeGuard(**settings)


def test_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="engine"):
        make(tmp_path, guard(), strategy=StepEngine(use_cpu=True)).train()
