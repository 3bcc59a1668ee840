"""`SavePolicy(on_exception=True)`: save a run that ends with an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hftrain.checkpoint.signals import TrainingStopped
from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger, warn_once
from hftrain.core.tree import map_tensors
from hftrain.optim.in_backward import UpdatesInBackward
from hftrain.run.counting import RunCounts, Take
from hftrain.run.parts import Ready, RunParts
from hftrain.run.saving import RunCheckpoints
from hftrain.step.stepper import Stepper

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Boundary:
    """The state at the start of a step that the step changes before it updates the weights."""

    step: int
    own: dict[str, Any]
    buffers: list[torch.Tensor]
    counts: Any


class Salvage:
    """Save the last complete step if an error leaves the context and the weights are still those of that step.

    Each step begins with a copy of what it may change before the update: random numbers, the open logging window,
    buffers. If the policy is off, nothing is copied or wrapped.

    Args:
        save: Commits a checkpoint.
    """

    def __init__(
        self, parts: RunParts, ready: Ready, counts: RunCounts, checkpoints: RunCheckpoints, save: Callable[[], None]
    ) -> None:
        self._task, self._optimizer = ready.task, ready.optimizer
        self._progress, self._control, self._phase = parts.progress, parts.control, parts.phase
        self._counts, self._checkpoints, self._save = counts, checkpoints, save
        is_asked, num_processes = parts.save_policy.on_exception, parts.strategy.world_size
        self.is_on = is_asked and num_processes == 1
        # Whether an evaluation is running: if it fails, the resumed run starts with it.
        self.is_evaluating = False
        self._boundary: _Boundary | None = None
        self._is_updating = False
        if is_asked and not self.is_on:
            warn_once(
                f"SavePolicy(on_exception=True) saves nothing here: an error ends one of {num_processes} processes, "
                "and a checkpoint takes them all. Use every_s, or save more often."
            )

    def __enter__(self) -> Salvage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_early = isinstance(error, TrainingStopped) and error.is_early and not self._is_saving()
        if self.is_on and error is not None and (is_early or isinstance(error, Exception)):
            try:
                self._save_after(error)
            except Exception as another:
                logger.error("Nothing was saved after the error, for that failed too: %s", another)

    def watching(self, take: Take) -> Take:
        """Return a function that stores the state at the step boundary, and then takes a step's batches."""
        if not self.is_on:
            return take

        def remembered(epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
            self._remember()
            return take(epoch_iterator, num_batches, device)

        return remembered

    def watch(self, stepper: Stepper) -> Stepper:
        """Return a stepper that marks the start of updates."""
        if not self.is_on:
            return stepper

        def step() -> bool:
            self._is_updating = True
            return stepper.step()

        return replace(stepper, step=step)

    def _remember(self) -> None:
        self._is_updating = isinstance(self._optimizer, UpdatesInBackward)
        self._boundary = _Boundary(
            step=self._progress.step,
            own=map_tensors(self._checkpoints.own_state(), torch.Tensor.clone),
            buffers=[buffer.clone() for buffer in self._task.buffers()],
            counts=self._counts.mark(),
        )

    def _is_saving(self) -> bool:
        return (self._phase.text or "").startswith("save")

    def _save_after(self, error: BaseException) -> None:
        boundary, step = self._boundary, self._progress.step
        if boundary is None or isinstance(error, CheckpointError) or self._checkpoints.saved_step == step:
            # Nothing was trained, saving failed, or this step is already saved.
            return
        if step == boundary.step:
            if self._is_updating:
                logger.error("Nothing was saved: the error came while step %d changed the weights.", step + 1)
                return
            if step == 0:
                return
            self._checkpoints.past_state = boundary.own
            with torch.no_grad():
                for buffer, value in zip(self._task.buffers(), boundary.buffers, strict=True):
                    buffer.copy_(value)
            self._counts.reset(boundary.counts)
        self._control.should_evaluate |= self.is_evaluating
        self._save()
        self._checkpoints.settle()
        logger.warning("Saved step %d, the last whole one, after %s.", step, type(error).__name__)
