"""An overridden `_maybe_log_save_evaluate`: its arguments, and what it may do without the base method."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hftrain.core.signatures import call_with
from hftrain.loops.window import as_number
from hftrain.run.counting import RunCounts
from hftrain.run.parts import RunParts


class StepEnd:
    """Call the override at the end of each step and epoch.

    The override may call the base method, or log, evaluate and save itself as the documented one does. Its `tr_loss`
    is the open logging window itself, so ``tr_loss -= tr_loss`` starts a new one, and the events that it fires reset
    their flags.

    Args:
        model: As the strategy wrapped it.
    """

    def __init__(self, parts: RunParts, model: nn.Module, counts: RunCounts) -> None:
        self._parts, self._model, self._counts = parts, model, counts
        self._start_time = time.time()
        self._act: Callable[[], None] = lambda: None

    def run(self, act: Callable[[], None], grad_norm: Any, learning_rate: Any) -> None:
        """Call the override; `act` does what the base method does."""
        self._act = act
        if self._parts.control.should_log:
            self._counts.read()
            # The norm of an engine, or a sharded one, is not a plain tensor.
            grad_norm = None if grad_norm is None else as_number(grad_norm)
        # In the documented order, because an override may take them by position.
        values = {
            "tr_loss": self._parts.losses.open_sum(),
            "grad_norm": grad_norm,
            "model": self._model,
            "trial": self._parts.trial,
            "epoch": self._parts.state.epoch,
            "ignore_keys_for_eval": self._parts.ignore_keys,
            "start_time": self._start_time,
            "learning_rate": learning_rate,
        }
        self._parts.events.answers = True
        try:
            call_with(self._parts.trainer._maybe_log_save_evaluate, values)
        finally:
            self._parts.events.answers = False

    def act(self, loss: torch.Tensor | None) -> None:
        """Handle requests of callbacks; called by the base method with the loss to log."""
        self._parts.events.answers = False
        self._parts.losses.give(loss)
        self._act()
        self._parts.losses.give(None)
        self._parts.events.answers = True
