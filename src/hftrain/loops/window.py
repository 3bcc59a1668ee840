"""Sums of a logging window, kept on the device until read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, get_args, get_origin, get_type_hints

import torch

from hftrain.core.errors import TaskError
from hftrain.core.log import warn_once
from hftrain.core.notes import describe
from hftrain.core.state import WindowState
from hftrain.core.tree import map_tensors

# Number of losses collected before they are summed. It is constant, so that a resumed sum is bit-identical.
_FOLD_EVERY = 64

Reduce = Callable[[torch.Tensor], torch.Tensor]

# By field of a window's state, the type that a file may hold.
_TYPES = get_type_hints(WindowState)


class LossWindow(WindowState):
    """Sum step losses on the device; reading them is the only synchronisation.

    The loop counts `num_steps`, and sets `grad_norm` and `learning_rate`.

    Args:
        hides_nonfinite: Replace a NaN or infinite loss by the window's mean in the logged loss (gradients do not
            change). Each one is counted, the count is logged, and the first one warns.
        reduce: Mean over ranks; collective.

    Source: the documented `logging_nan_inf_filter`.
    """

    _has_replaced = False  # whether the sum holds what replaces the hidden losses

    def __init__(self, *, hides_nonfinite: bool, reduce: Reduce) -> None:
        super().__init__()
        self._hides_nonfinite = hides_nonfinite
        self._reduce = reduce
        self._has_warned = False

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of one micro-step, scaled to its share of the step: a detached 0-d tensor."""
        self.num_micro_steps += 1
        self.pending.append(loss)
        if len(self.pending) == _FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        """Sum the pending losses: a few operations for many micro-steps instead of a few for each."""
        if self.pending:
            losses = _stacked(self.pending)
            self.pending = []
            is_finite = losses.isfinite()
            self.num_finite = self.num_finite + is_finite.sum()
            if self._hides_nonfinite:
                losses = torch.where(is_finite, losses, 0.0)
            total = losses.sum()
            self.sum = total if self.sum is None else self.sum + total

    def leave(self, num_steps: int) -> None:
        """Count all but the last `num_steps` steps as read; does nothing unless the window is live."""

    def read(self) -> dict[str, float]:
        """Return the window's mean loss per step and the last norm, and start a new window; collective.

        The host waits for the device once.
        """
        logs: dict[str, float] = {}
        self._fold()
        has_loss = self.sum is not None and self.num_steps > 0
        norm: Sequence[Any] = () if self.grad_norm is None else (self.grad_norm,)
        if has_loss:
            total, num_finite, *norm = as_numbers(self._reduce(self._filled_up()), self.num_finite, *norm)
            self._count_nonfinite(int(num_finite))
            logs["loss"] = total / self.num_steps
            if math.isfinite(total) or not self._hides_nonfinite:
                self.run_total += total
                self.run_steps += self.num_steps
        if self.num_hidden:
            logs["nonfinite_losses"] = self.num_hidden
            self._warn_nonfinite(is_shown=not math.isfinite(logs.get("loss", 0.0)))
        if norm:
            logs["grad_norm"] = as_numbers(*norm)[0]
        self.sum = None
        self.num_finite = self.num_steps = self.num_micro_steps = 0
        return logs

    def _warn_nonfinite(self, *, is_shown: bool) -> None:
        """Warn of the run's first non-finite losses, of which the logged mean may consist entirely."""
        if not self._has_warned:
            self._has_warned = True
            warn_once(
                "The loss was NaN or infinite in every step since the last log; 'nonfinite_losses' counts such losses."
                if is_shown
                else "The loss was NaN or infinite at least once. logging_nan_inf_filter=True keeps it out of the "
                "logged mean; 'nonfinite_losses' in the logs counts it. Set logging_nan_inf_filter=False to see it."
            )

    def _filled_up(self) -> Any:
        """Return the sum with the mean of the others in place of the hidden losses; NaN if none is finite."""
        if not (self._hides_nonfinite and isinstance(self.num_finite, torch.Tensor)):
            return self.sum
        # Without hidden losses the factor is 1, so that nobody has to ask the device whether there are any.
        factor = 1.0 if self._has_replaced else self.num_micro_steps / self.num_finite
        return torch.where(self.num_finite > 0, self.sum * factor, float("nan"))  # type: ignore[operator]

    def _count_nonfinite(self, num_finite: int) -> None:
        self.num_nonfinite += self.num_micro_steps - num_finite
        self.num_finite = self.num_micro_steps = 0

    @property
    def num_hidden(self) -> int:
        """The number of non-finite losses that the logged mean leaves out."""
        return self.num_nonfinite if self._hides_nonfinite else 0

    def total_nonfinite(self) -> int:
        """Return how many losses of the run were not finite, including those not read yet; synchronises."""
        # The pending losses are not summed here: that would change the last bits of a resumed sum.
        num_finite = int(self.num_finite) + (int(torch.stack(self.pending).isfinite().sum()) if self.pending else 0)
        return self.num_nonfinite + self.num_micro_steps - num_finite

    def state_dict(self) -> dict[str, Any]:
        """Return everything summed so far, as tensors and plain numbers; collective if the norm is sharded."""
        norm = _whole(self.grad_norm)
        # An engine may return an object that reads its norm on conversion to float.
        norm = norm if norm is None or isinstance(norm, torch.Tensor) else float(norm)
        return {**{name: getattr(self, name) for name in _TYPES}, "grad_norm": norm}

    def load_state_dict(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Restore the state that `state_dict` returned; mutates the object.

        Raises:
            ValueError: The state is not valid.
        """
        for name, value in state.items():
            if name not in _TYPES or not _is_of(value, _TYPES[name]):
                raise ValueError(f"The state of a logging window cannot hold {name!r}: {describe(value)}.")
        vars(self).update(map_tensors(dict(state), lambda tensor: tensor.to(device)))

    def mean_over_run(self) -> float:
        """Return the mean loss per step of all readings so far: 0 before the first, NaN if none was finite."""
        if not self.run_steps:
            return math.nan if self.num_hidden else 0.0
        return self.run_total / self.run_steps


def _stacked(losses: list[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.stack(losses)
    except TypeError as error:
        other = next(each for each in losses if not isinstance(each, torch.Tensor))
        raise TaskError(
            f"Cannot log what the Trainer's training_step returned ({describe(other)}):",
            "it is not a tensor.",
            "Return the detached loss of the micro-batch: loss.detach().",
        ) from error


class LogWindow:
    """Average the numbers that steps return in `StepOutput.logs`, on the device until read.

    Args:
        gather_object: Returns every rank's plain data; collective.
    """

    def __init__(self, *, gather_object: Callable[[Any], list[Any]]) -> None:
        self._gather_object = gather_object
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, logs: Mapping[str, Any], *, weight: int = 1) -> None:
        """Add one step's numbers; tensors are detached and stay on their device.

        Args:
            weight: Their weight in the mean: the number of samples.
        """
        if not isinstance(logs, Mapping):
            raise TaskError(f"Cannot log {describe(logs)}:", "it is not a dict.", "Return logs={'name': number, ...}.")
        for name, value in logs.items():
            try:
                value = (value.detach() if isinstance(value, torch.Tensor) else value) * weight
            except TypeError:
                value = _number(name, value) * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + weight

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last reading, as tensors and plain numbers."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Restore the state that `state_dict` returned; mutates the object.

        Raises:
            ValueError: The state is not valid.
        """
        sums, counts = state.get("sums", {}), state.get("counts", {})
        if sums.keys() != counts.keys() or not all(map(_is_sum, [*sums.values(), *counts.values()])):
            raise ValueError("The state of a window of logs does not hold sums and counts of the same names.")
        self._sums = map_tensors(dict(state.get("sums", {})), lambda tensor: tensor.to(device))
        self._counts = dict(state.get("counts", {}))

    def read(self) -> dict[str, float]:
        """Return the means over steps and ranks and reset them; synchronises, collective."""
        numbers = {name: (_number(name, value), self._counts[name]) for name, value in self._sums.items()}
        self._sums, self._counts = {}, {}
        merged: dict[str, list[float]] = {}
        for per_rank in self._gather_object(numbers):
            for name, (value, count) in per_rank.items():
                total = merged.setdefault(name, [0.0, 0])
                total[0] += value
                total[1] += count
        return {name: value / count for name, (value, count) in merged.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        remedy = "Return a number under that name."
        if hasattr(value, "compute"):
            remedy = "Return its compute(), or name the metric in the task's metrics('train'), which are logged too."
        raise TaskError(f"Cannot log {name!r}:", f"it is {kind}, but logs hold only numbers.", remedy) from error


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value of a state has a field's type, without tensors of several numbers and oversized ones."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(each, *get_args(kind)) for each in value)
    is_one = value.dim() == 0 if isinstance(value, torch.Tensor) else True
    return is_one and isinstance(value, kind) and not (isinstance(value, int) and abs(value) >= 1 << 63)


def _is_sum(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def as_numbers(*values: Any) -> list[float]:
    """Return numbers, 0-d tensors and sharded ones (`DTensor`) as floats; collective if one is sharded.

    The host waits once, if they are plain tensors.
    """
    tensors = [_whole(value) for value in values]
    devices = {value.device if type(value) is torch.Tensor and value.numel() == 1 else None for value in tensors}
    if None in devices or len(devices) > 1:
        return [float(value) for value in tensors]
    dtype = reduce(torch.promote_types, [value.dtype for value in tensors], torch.float32)
    numbers: list[float] = torch.stack([value.detach().reshape(()).to(dtype) for value in tensors]).tolist()
    return numbers


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
