"""The logging window of a run whose Trainer overrides `_maybe_log_save_evaluate`, which reads and resets it."""

from __future__ import annotations

from typing import Any

import torch

from hftrain.loops.window import LossWindow


class LiveLossWindow(LossWindow):
    """A window whose sum is always up to date, for an override of `_maybe_log_save_evaluate`: it may read and reset it.

    So a hidden loss is replaced at once, by the mean so far, and not when the window is read, by the mean of all.

    Attributes:
        logged_sum: What the override passed on to be logged in place of the sum; None if it passed none.
    """

    logged_sum: Any = None
    _has_replaced = True

    def add(self, loss: torch.Tensor) -> None:
        self.num_micro_steps += 1
        loss = loss.detach()
        previous_sum = torch.zeros_like(loss) if self.sum is None else self.sum
        is_finite = loss.isfinite()
        self.num_finite = self.num_finite + is_finite
        if self._hides_nonfinite:
            # transformers' formula: the sum over 1 + the updates since the last log.
            loss = torch.where(is_finite, loss, previous_sum / (1 + self.num_steps))
        self.sum = previous_sum + loss

    def open_sum(self) -> torch.Tensor:
        """Return the sum since the last reading: the tensor itself, which may be reset in place."""
        self._fold()  # what a checkpoint of a run without the override has left
        if self.sum is None:
            self.sum = torch.zeros(())
        return self.sum

    def leave(self, num_steps: int) -> None:
        """Count all but the last `num_steps` steps as read, for code that resets the sum."""
        self._count_nonfinite(int(self.num_finite))
        self.run_steps += self.num_steps - num_steps
        self.num_steps = num_steps

    def read(self) -> dict[str, float]:
        """Log what the override passed on, or the sum, which is set to 0 as code that holds it expects."""
        self._fold()
        if self.logged_sum is not None:
            self.sum = torch.as_tensor(self.logged_sum).detach()
        logged = self.sum
        logs = super().read()
        if logged is not None:
            logged.zero_()
        return logs
