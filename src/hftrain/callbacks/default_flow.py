"""The callbacks of a plain run: what decides when to log, evaluate, save and stop, and what prints the logs."""

from __future__ import annotations

from typing import Any

from hftrain.callbacks.base import CallbackResult, Metrics, TrainerCallback
from hftrain.core.state import TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Set control flags according to the logging, evaluation and save strategies and `max_steps`.

    The intervals are read from the state at each step, so a callback may change them while training. A run that reaches
    `max_steps` or is stopped within an epoch saves at its end, unless the save strategy is ``"no"`` or ``"best"``; one
    that reaches `max_steps` evaluates there, too, if the evaluation strategy is ``"steps"``.

    Source: the documented `DefaultFlowCallback`.
    """

    _saved_step: int | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved_step = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Set the flags due after this step, and stop at `max_steps`."""
        step = state.global_step
        is_last = step >= state.max_steps
        logs_now = args.logging_strategy == "steps" and _is_multiple(step, state.logging_steps)
        if logs_now or (step == 1 and args.logging_first_step):
            control.should_log = True
        may_evaluate = args.eval_strategy == "steps" and step >= args.eval_delay
        if may_evaluate and (is_last or _is_multiple(step, state.eval_steps)):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (is_last or _is_multiple(step, state.save_steps)):
            control.should_save = True
            # Set here, because `on_save` may come later, or never if the disk is full.
            self._saved_step = step
        if is_last:
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and (state.epoch or 0.0) >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        # If another callback stopped the run, the save strategy still requires a checkpoint of its end.
        if control.should_training_stop and args.save_strategy == "steps" and self._saved_step != state.global_step:
            control.should_save = True
        return control

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step so that the final state is not saved twice."""
        self._saved_step = max(self._saved_step or 0, state.global_step)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


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
