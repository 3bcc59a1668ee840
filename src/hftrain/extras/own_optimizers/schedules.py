"""Learning rate schedules of several optimizers, stepped after updates, epochs or evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import TaskError


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """A schedule, and when it is stepped.

    Args:
        scheduler: One of torch's, or alike.
        interval: ``"step"`` after each update of its optimizer, ``"epoch"`` after each epoch, ``"evaluate"`` after each
            evaluation that has the metric `monitor`.
        frequency: After how many of them.
        monitor: The metric for `ReduceLROnPlateau`, with or without ``eval_``.
    """

    scheduler: Any
    interval: str = "step"
    frequency: int = 1
    monitor: str = "loss"


class Schedules(TrainerCallback):
    """Step schedules at their own times; a callback of the run.

    Args:
        follows_updates: Whether `step` is called for each update; otherwise each optimizer calls `step_one`.
    """

    def __init__(self, optimizer: Any, members: dict[str, TimedSchedule], *, follows_updates: bool = True) -> None:
        self.optimizer, self.members, self._follows_updates = optimizer, members, follows_updates
        self._counts = dict.fromkeys(members, 0)

    def step(self) -> None:
        """Step those of the updates; called after each."""
        if self._follows_updates:
            self._step_all("step")

    def step_one(self, name: str) -> None:
        """Step that of one optimizer, after it has stepped."""
        if name in self.members and self.members[name].interval == "step":
            self._count_and_step(name)

    def wrap_parts(self, parts: Any) -> Any:
        """Keep the progress, which tells whether an epoch has ended."""
        self._progress = parts.progress
        return parts

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step those of the epochs, unless the run stops within one, which a resumed run will end."""
        if not self._progress.is_within_epoch:
            self._step_all("epoch")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Step those of the evaluations; the one before the first step does not count.

        Raises:
            TaskError: No metric has the name of `monitor`.
        """
        for name, schedule in self.members.items() if state.global_step else ():
            metric = schedule.monitor.removeprefix("eval_")
            if schedule.interval == "evaluate" and f"eval_{metric}" in metrics:
                self._count_and_step(name, metrics[f"eval_{metric}"])
            elif schedule.interval == "evaluate" and "eval_runtime" in metrics:
                raise TaskError(
                    f"Cannot step the schedule of {name or 'the optimizer'} on {schedule.monitor!r}.",
                    "The evaluation has no such metric.",
                    f"Set monitor to one of: {', '.join(sorted(metrics))}.",
                )

    def _step_all(self, interval: str) -> None:
        for name, schedule in self.members.items():
            if schedule.interval == interval:
                self._count_and_step(name)

    def _count_and_step(self, name: str, *metric: float) -> None:
        self._counts[name] += 1
        if self._counts[name] % self.members[name].frequency == 0:
            with warnings.catch_warnings():
                # Of a resumed run whose first event is the end of an epoch.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.members[name].scheduler.step(*metric)

    def get_last_lr(self) -> list[float]:
        """Return the current rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all by name."""
        return {
            name: {"count": self._counts[name], "state": schedule.scheduler.state_dict()}
            for name, schedule in self.members.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        for name, schedule in self.members.items():
            self._counts[name] = state[name]["count"]
            schedule.scheduler.load_state_dict(state[name]["state"])
