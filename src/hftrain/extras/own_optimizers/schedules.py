"""Learning rate schedules of several optimizers, stepped after updates, epochs or evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import TaskError


@dataclass(frozen=True, slots=True)
class Timed:
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

    def __init__(self, optimizer: Optimizer, timed: Mapping[str, Timed], *, follows_updates: bool = True) -> None:
        self.optimizer, self.timed, self._follows = optimizer, dict(timed), follows_updates
        self._counts = dict.fromkeys(timed, 0)

    def step(self) -> None:
        """Step those of the updates; called after each."""
        if self._follows:
            self._advance("step")

    def step_one(self, name: str) -> None:
        """Step that of one optimizer, after it has stepped."""
        if name in self.timed and self.timed[name].interval == "step":
            self._count(name)

    def wrap_parts(self, parts: Any) -> Any:
        """Keep the progress of the run."""
        self._progress = parts.progress
        return parts

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step those of the epochs, unless the run stops within one, which a resumed run will end."""
        if not self._progress.is_within_epoch:
            self._advance("epoch")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Step those of the evaluations; the one before the first step does not count.

        Raises:
            TaskError: No metric has the name of `monitor`.
        """
        for name, each in self.timed.items() if state.global_step else ():
            metric = each.monitor.removeprefix("eval_")
            if each.interval == "evaluate" and f"eval_{metric}" in metrics:
                self._count(name, metrics[f"eval_{metric}"])
            elif each.interval == "evaluate" and "eval_runtime" in metrics:
                raise TaskError(
                    f"Cannot step the schedule of {name or 'the optimizer'} on {each.monitor!r}.",
                    "The evaluation has no such metric.",
                    f"Set monitor to one of: {', '.join(sorted(metrics))}.",
                )

    def _advance(self, interval: str) -> None:
        for name, each in self.timed.items():
            if each.interval == interval:
                self._count(name)

    def _count(self, name: str, *metric: float) -> None:
        self._counts[name] += 1
        if self._counts[name] % self.timed[name].frequency == 0:
            with warnings.catch_warnings():
                # Of a resumed run whose first event is the end of an epoch.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.timed[name].scheduler.step(*metric)

    def get_last_lr(self) -> list[float]:
        """Return the current rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all by name."""
        return {
            name: {"count": self._counts[name], "state": each.scheduler.state_dict()}
            for name, each in self.timed.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        for name, each in self.timed.items():
            self._counts[name] = state[name]["count"]
            each.scheduler.load_state_dict(state[name]["state"])
