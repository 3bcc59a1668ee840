"""The same run on the CPU and on the simulated accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.tiny import Net, at, make_trainer

from hftrain import TrainerCallback, set_seed

Make = Callable[..., Any]
# What a log holds of the machine, not of the training.
_TIMES = ("_runtime", "_per_second", "epoch_time", "_seconds", "memory", "_time")


def weights(trainer: Any) -> list[torch.Tensor]:
    """Return the weights of a Trainer's model, on the CPU."""
    return [value.detach().cpu() for value in trainer.model.state_dict().values()]


def numbers(trainer: Any) -> list[dict[str, Any]]:
    """Return what a Trainer has logged, without what depends on the machine; a NaN as a word, to compare it."""
    return [
        {
            name: value if value == value else "nan"
            for name, value in entry.items()
            if not any(part in name for part in _TIMES)
        }
        for entry in trainer.state.log_history
    ]


def seed_once() -> TrainerCallback:
    """Return a callback that lets the first step begin with the same generators on both devices.

    On the CPU, the one of the device has made the weights, too.
    """

    def seed(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            set_seed(1)

    return at("on_step_begin", seed)


def run(folder: Path, model: Make = Net, *callbacks: Make, use_cpu: bool, resume: Any = None, **options: Any) -> Any:
    """Train a new model on one of the two devices, from the same seed."""
    set_seed(0)
    trainer = make_trainer(folder, model(), *(make() for make in callbacks), use_cpu=use_cpu, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def run_on_both(folder: Path, model: Make = Net, *callbacks: Make, tolerance: float = 0, **options: Any) -> Any:
    """Train on both devices, compare weights and logs, and return the device's Trainer.

    Args:
        folder: Where the runs write, each in a folder of its own.
        model: Makes the model or task.
        callbacks: Make the callbacks.
        tolerance: How far the weights may differ; 0: not at all.
        options: As for `support.tiny.make_trainer`.
    """
    expected = run(folder / "cpu", model, *callbacks, use_cpu=True, **options)
    found = run(folder / "sim", model, *callbacks, use_cpu=False, **options)
    assert next(found.model.parameters()).device.type == "sim"
    for one, other in zip(weights(expected), weights(found), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=tolerance)
    if tolerance == 0:
        assert numbers(found) == numbers(expected)
    return found
