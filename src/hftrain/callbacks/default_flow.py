"""The callbacks of a plain run: what decides when to log, evaluate, save and stop, and what prints the logs."""

from __future__ import annotations

import functools
from typing import Any

from hftrain.callbacks.base import CallbackResult, Metrics, TrainerCallback
from hftrain.core.progress import Cadence, TrainerControl
from hftrain.core.state import TrainerState

# Cached, because each step needs three cadences, and a run has only a few.
_cadence = functools.lru_cache(maxsize=64)(Cadence)


class DefaultFlowCallback(TrainerCallback):
    """Set control flags according to the logging, evaluation and save strategies and `max_steps`.

    The intervals are read from the state at each step, so a callback may change them while training. A run that reaches
    `max_steps` or is stopped within an epoch saves at its end, unless the save strategy is ``"no"`` or ``"best"``; one
    that reaches `max_steps` evaluates there, too, if the evaluation strategy is ``"steps"``.

    Source: the documented `DefaultFlowCallback`.
    """

    _saved_step: int | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reset the record of saves."""
        self._saved_step = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Set the flags due after this step, and stop at `max_steps`."""
        step = state.global_step
        is_last = step >= state.max_steps
        log = _cadence(unit=args.logging_strategy, every=state.logging_steps)
        evaluate = _cadence(unit=args.eval_strategy, every=state.eval_steps, delay=args.eval_delay)
        save = _cadence(unit=args.save_strategy, every=state.save_steps)
        if log.is_due_at_step(step) or (step == 1 and args.logging_first_step):
            control.should_log = True
        if evaluate.is_due_at_step(step) or (is_last and args.eval_strategy == "steps" and step >= args.eval_delay):
            control.should_evaluate = True
        if save.is_due_at_step(step) or (is_last and args.save_strategy == "steps"):
            control.should_save = True
            # Set here, because `on_save` may come later, or never if the disk is full.
            self._saved_step = step
        if is_last:
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Set the flags due after this epoch."""
        epoch = state.epoch or 0.0
        if _cadence(unit=args.logging_strategy).is_due_at_epoch(epoch):
            control.should_log = True
        if _cadence(unit=args.eval_strategy, delay=args.eval_delay).is_due_at_epoch(epoch):
            control.should_evaluate = True
        if _cadence(unit=args.save_strategy).is_due_at_epoch(epoch):
            control.should_save = True
        # If another callback stopped the run, the save strategy still requires a checkpoint of its end.
        if control.should_training_stop and args.save_strategy == "steps" and self._saved_step != state.global_step:
            control.should_save = True
        return control

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step so that the final state is not saved twice."""
        self._saved_step = max(self._saved_step or 0, state.global_step)


class PrinterCallback(TrainerCallback):
    """Print every log entry in full precision, on each machine's first process.

    Source: the documented `PrinterCallback`.
    """

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        """Print the entry, without the count of floating-point operations."""
        if state.is_local_process_zero and logs:
            print({name: value for name, value in logs.items() if name != "total_flos"}, flush=True)
