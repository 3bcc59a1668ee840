"""`SavePolicy(on_exception=True)`: save a run that ends with an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger, warn_once
from hftrain.core.tree import map_tensors
from hftrain.loops.fit import FitParts
from hftrain.preemption.signals import TrainingStopped
from hftrain.run.counting import RunCounts
from hftrain.run.parts import RunParts
from hftrain.run.saving import Saver
from hftrain.step.stepper import has_own_steps

logger = get_logger(__name__)


class Salvage:
    """Save the last complete step if an error leaves the context and the weights are still those of that step.

    Each step begins with a copy of what it may change before the update: random numbers, the open logging window,
    buffers.
    """

    def __init__(self, parts: RunParts, counts: RunCounts, saver: Saver) -> None:
        self._parts, self._counts, self._saver = parts, counts, saver
        # The step that was complete at the last boundary, and what restores the state there until the update.
        self._step = 0
        self._restore: Callable[[], None] | None = None
        self._is_updating = False

    def __enter__(self) -> Salvage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_early = isinstance(error, TrainingStopped) and error.is_early and not self._parts.is_saving
        if error is not None and (is_early or isinstance(error, Exception)):
            try:
                self._save_after(error)
            except Exception as another:
                logger.error("Nothing was saved after the error, for that failed too: %s", another)

    def watch(self, parts: FitParts) -> FitParts:
        """Return a loop's parts that store the state before a step takes its batches, and note the start of updates."""
        if (num_processes := self._parts.strategy.world_size) > 1:
            warn_once(
                f"SavePolicy(on_exception=True) saves nothing here: an error ends one of {num_processes} processes, "
                "and a checkpoint takes them all. Use every_s, or save more often."
            )
            return parts

        def get_samples(*args: Any) -> tuple[list[Any], Any]:
            self._mark_state()
            return parts.hooks.get_batch_samples(*args)

        def step() -> bool:
            self._is_updating = True
            return parts.stepper.step()

        hooks, stepper = replace(parts.hooks, get_batch_samples=get_samples), replace(parts.stepper, step=step)
        return replace(parts, hooks=hooks, stepper=stepper)

    def _mark_state(self) -> None:
        """Note how to go back to this boundary: a step that fails has drawn numbers and changed buffers."""
        task, contents = self._parts.task, self._saver.contents
        task_state = map_tensors(contents.registry.own_state(), torch.Tensor.clone)
        buffers, counts = [buffer.clone() for buffer in task.buffers()], self._counts.mark()

        @torch.no_grad()
        def restore() -> None:
            contents.past_state = task_state
            for buffer, value in zip(task.buffers(), buffers, strict=True):
                buffer.copy_(value)
            self._counts.reset(counts)

        self._step, self._restore = self._parts.progress.step, restore
        optimizer = self._parts.optimizer
        self._is_updating = hasattr(optimizer, "update_in_backward") or has_own_steps(optimizer)

    def _save_after(self, error: BaseException) -> None:
        step, saver, control = self._parts.progress.step, self._saver, self._parts.control
        if self._restore is None or isinstance(error, CheckpointError) or saver.saved_step == step:
            # Nothing was trained, saving failed, or this step is already saved.
            return
        if step == self._step:
            if self._is_updating:
                logger.error("Nothing was saved: the error came while step %d changed the weights.", step + 1)
                return
            if step == 0:
                return
            self._restore()
            # What is requested belongs to the end of the step that failed.
            control.should_log = control.should_evaluate = control.should_save = False
        control.should_evaluate |= self._parts.is_evaluating
        saver.save(is_planned=control.should_save)
        saver.writer.finish()
        logger.warning("Saved step %d, the last whole one, after %s.", step, type(error).__name__)
