"""An overridden `_maybe_log_save_evaluate`: what it is given, and what it may do without the base method."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hftrain.loops.window import as_number
from hftrain.trainer.hooks import call_with

if TYPE_CHECKING:
    from hftrain.trainer.session import TrainSession


class StepEnd:
    """Call the override at the end of each step and epoch.

    The override may leave things to the base method, or log, evaluate and save itself as the documented one does. Its
    `tr_loss` is the open logging window itself, so ``tr_loss -= tr_loss`` begins a new one, and the events it causes
    reset the flags they answer.

    Args:
        session: The run.
    """

    def __init__(self, session: TrainSession) -> None:
        self.session = session
        self._start_time = time.time()
        self._act: Callable[[], None]

    def run(self, act: Callable[[], None], grad_norm: Any, learning_rate: Any) -> None:
        """Call the override; `act` is what the base method does."""
        session, trainer = self.session, self.session.trainer
        self._act = act
        if trainer.control.should_log:
            session.counts.read()
            # What an engine hands out, or a sharded norm, is no plain tensor.
            grad_norm = None if grad_norm is None else as_number(grad_norm)
        values = {
            "tr_loss": session.losses.open_sum(),
            "grad_norm": grad_norm,
            "model": trainer.model_wrapped,
            "trial": trainer._trial,
            "epoch": trainer.state.epoch,
            "ignore_keys_for_eval": session.ignore_keys,
            "start_time": self._start_time,
            "learning_rate": learning_rate,
        }
        trainer.callback_handler.answers = True
        try:
            call_with(trainer._maybe_log_save_evaluate, values)
        finally:
            trainer.callback_handler.answers = False

    def act(self, loss: torch.Tensor | None) -> None:
        """Do what callbacks asked for, called back by the base method with the loss that is to be logged."""
        handler = self.session.trainer.callback_handler
        handler.answers = False
        self.session.losses.give(loss)
        self._act()
        self.session.losses.give(None)
        handler.answers = True
