"""An overridden `_maybe_log_save_evaluate`: what it is given, and what it may do without the base method."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hftrain.callbacks.runner import CallbackHandler
from hftrain.core.progress import TrainerControl
from hftrain.core.signatures import call_with
from hftrain.core.state import TrainerState
from hftrain.loops.window import LossWindow, as_number
from hftrain.trainer.counting import RunCounts


class StepEnd:
    """Call the override at the end of each step and epoch.

    The override may leave things to the base method, or log, evaluate and save itself as the documented one does. Its
    `tr_loss` is the open logging window itself, so ``tr_loss -= tr_loss`` begins a new one, and the events it causes
    reset the flags they answer.

    Args:
        hook: The override.
        state, control: The run's.
        events: Tells the callbacks.
        losses: The open logging window.
        counts: Brought up to date before a log.
        values: Further arguments of the override, by name.
    """

    def __init__(
        self,
        hook: Callable[..., None],
        *,
        state: TrainerState,
        control: TrainerControl,
        events: CallbackHandler,
        losses: LossWindow,
        counts: RunCounts,
        values: Mapping[str, Any],
    ) -> None:
        self._hook, self._state, self._control, self._events = hook, state, control, events
        self._losses, self._counts = losses, counts
        self._values, self._start_time = values, time.time()
        self._act: Callable[[], None] = lambda: None

    def run(self, act: Callable[[], None], grad_norm: Any, learning_rate: Any) -> None:
        """Call the override; `act` is what the base method does."""
        self._act = act
        if self._control.should_log:
            self._counts.read()
            # What an engine hands out, or a sharded norm, is no plain tensor.
            grad_norm = None if grad_norm is None else as_number(grad_norm)
        # In the documented order: an override may take them by position.
        values = {
            "tr_loss": self._losses.open_sum(),
            "grad_norm": grad_norm,
            "model": self._values["model"],
            "trial": self._values["trial"],
            "epoch": self._state.epoch,
            "ignore_keys_for_eval": self._values["ignore_keys_for_eval"],
            "start_time": self._start_time,
            "learning_rate": learning_rate,
        }
        self._events.answers = True
        try:
            call_with(self._hook, values)
        finally:
            self._events.answers = False

    def act(self, loss: torch.Tensor | None) -> None:
        """Do what callbacks asked for, called back by the base method with the loss that is to be logged."""
        self._events.answers = False
        self._losses.give(loss)
        self._act()
        self._losses.give(None)
        self._events.answers = True
