"""Act at intervals in passes, tokens or time, and stop after a time: what the default callback's steps cannot say."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from hftrain.callbacks.base import ExportableState, TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.lengths import Length
from hftrain.core.log import get_logger
from hftrain.core.state import TrainerControl, TrainerState

logger = get_logger(__name__)

STOP, EVALUATE = "should_training_stop", "should_evaluate"
# With several processes, about this long passes between two readings of the clock, which are collective.
_READING_S = 1.0


class IntervalCallback(TrainerCallback, ExportableState):
    """Set control flags at intervals that are counted over all sessions of a run.

    Tokens are counted whenever the losses are logged. Time is that of training, with evaluations and saves, by the main
    process's clock.

    Args:
        intervals: By flag; ``should_training_stop`` is set once its length has passed.
        group: A strategy, whose processes share the clock.
    """

    # A resume gives the state to this instance.
    is_rebuilt = False

    def __init__(self, intervals: Mapping[str, Length], group: Any) -> None:
        self.intervals, self._group, self.elapsed_s = intervals, group, 0.0
        # By flag: the interval's text, and how many have passed.
        self.passed: dict[str, list[Any]] = {}

    def state(self) -> dict[str, Any]:
        """Return the seconds of training so far, and the intervals that have passed, by flag."""
        passed = {flag: list(counts) for flag, counts in self.passed.items()}
        return {"attributes": {"elapsed_s": self.elapsed_s, "passed": passed}}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock; raise `ConfigError` for an interval in passes of a stream without a length."""
        if state.global_step == 0:
            self.elapsed_s, self.passed = 0.0, {}
        self._start_s, self._last_reading, self._next_reading = time.monotonic() - self.elapsed_s, state.global_step, 0
        for flag, interval in self.intervals.items():
            if interval.unit == "ep" and state.num_train_epochs == sys.maxsize:
                raise ConfigError(
                    f"Cannot act every {interval.text!r}.",
                    "The data has no length, so a part of a pass cannot be known.",
                    "Give the interval in updates ('500ba'), tokens or time.",
                )
            if self.passed.get(flag, [None])[0] != interval.text:
                self.passed[flag] = [interval.text, self._num_passed(interval, state)]

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= self._next_reading and "s" in {interval.unit for interval in self.intervals.values()}:
            self._read_clock(state.global_step)
        self._set_flags(args, state, control, ("ep", "s"))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Act on tokens, which have just been summed over the processes; not when an evaluation logs."""
        if "learning_rate" in kwargs["logs"]:
            self._set_flags(args, state, control, ("tok",))

    def _set_flags(self, args: Any, state: TrainerState, control: TrainerControl, units: tuple[str, ...]) -> None:
        """Set the flags whose interval has passed; several that passed at once count as one."""
        for flag, interval in self.intervals.items():
            if interval.unit not in units:
                continue
            entry, number = self.passed[flag], self._num_passed(interval, state)
            is_due = number > (0 if flag == STOP else entry[1])
            entry[1] = number
            if flag == STOP and is_due:
                logger.warning("The training stops: max_time=%r has passed.", interval.text)
            if is_due and not (flag == EVALUATE and state.global_step < args.eval_delay):
                setattr(control, flag, True)

    def _num_passed(self, interval: Length, state: TrainerState) -> int:
        position = {"ep": state.epoch or 0.0, "tok": state.num_input_tokens_seen, "s": self.elapsed_s}[interval.unit]
        return math.floor(position / interval.value + 1e-9)

    def _read_clock(self, step: int) -> None:
        now_s, num_steps = time.monotonic() - self._start_s, max(1, step - self._last_reading)
        if self._group.world_size > 1:
            step_s = max(now_s - self.elapsed_s, 1e-6) / num_steps
            # Twice as far as the last time at most: the next steps may be slower.
            ahead = max(1, min(int(_READING_S / step_s), 2 * num_steps))
            now_s, ahead = self._group.broadcast_object([now_s, ahead])
            self._next_reading = step + ahead
        self.elapsed_s, self._last_reading = now_s, step
