"""Runs that are stopped and go on, held against runs that never were."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from hftrain import Trainer, TrainerCallback

# Numbers of a log line that tell how long something took.
_CLOCKS = ("_runtime", "_per_second", "_preparation_time")


class StopAt(TrainerCallback):
    """Save and stop at one step; None never does."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class Stop(TrainerCallback):
    """Stop at one step, and leave saving to the arguments."""

    def __init__(self, step: int = 4) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


class Signal(TrainerCallback):
    """Be asked to stop, or to save, by a signal at the end of a step; None never is."""

    def __init__(self, step: int | None, name: str = "SIGTERM") -> None:
        self.step, self.name = step, name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            signal.raise_signal(signal.Signals[self.name])


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it comes back from a file that is read without trust."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def without_times(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Leave out of a log history what the clock decides."""
    return [{name: value for name, value in line.items() if not name.endswith(_CLOCKS)} for line in history]


def comparable(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what of a log history is the same in every run: not the line that ends one, as a stopped run has more."""
    return without_times(line for line in history if "train_loss" not in line)


def assert_trained(history: Iterable[Mapping[str, Any]]) -> None:
    """Fail if a log has no step with a rate and, where norms are logged, a gradient: runs that do nothing are alike.

    A single line may be that of the first step of a warm-up, or of the last step of a schedule.
    """
    lines = [line for line in history if "loss" in line]
    assert any((line["learning_rate"] or len(lines) == 1) and line.get("grad_norm", 1.0) for line in lines), lines


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return what two runs must agree in: weights, optimizer, schedule, log history."""
    assert trainer.optimizer is not None
    assert_trained(trainer.state.log_history)
    return {
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": None if trainer.lr_scheduler is None else trainer.lr_scheduler.state_dict(),
        "log_history": comparable(trainer.state.log_history),
    }


def check_resumes(make: Callable[..., Trainer], folder: Path, stops: Iterable[int]) -> tuple[Trainer, Trainer]:
    """Train without a stop, and with stops and resumes: both end with the same, to the bit, and with other weights.

    Args:
        make: Returns a Trainer for a folder and callbacks.
        folder: Where both have a folder.
        stops: The steps at which the second is stopped.

    Returns:
        The Trainer that was never stopped, and the one that went on last.
    """
    whole = make(folder / "whole")
    before = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    assert any(not torch.equal(value, before[name]) for name, value in whole.model.state_dict().items())
    for number, stop in enumerate((*stops, None)):
        last = make(folder / "parts", StopAt(stop))
        output = last.train(resume_from_checkpoint=number > 0)
        assert stop in (None, output.global_step)
    assert last.state.global_step == whole.state.global_step
    assert_same(outcome(last), outcome(whole))
    return whole, last


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Compare nested values bit for bit."""
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, numpy.ndarray):
        assert numpy.array_equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), (where, ours, theirs)
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where
