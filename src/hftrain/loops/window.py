"""What a logging window has summed up, kept on the device until somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors

Reduce = Callable[[torch.Tensor], torch.Tensor]


class LossWindow:
    """Sum step losses on the device; reading them is the only synchronisation.

    Args:
        filters_nonfinite: Put the window's running mean in place of a NaN or infinite loss in what is logged (the
            gradients are not touched). Each one is counted, the count is logged, and the first one warns.
        reduce: Mean over ranks; collective.

    Source: the documented `logging_nan_inf_filter`.
    """

    def __init__(self, *, filters_nonfinite: bool, reduce: Reduce) -> None:
        self._filters = filters_nonfinite
        self._reduce = reduce
        self.sum: torch.Tensor | None = None
        self.num_nonfinite: torch.Tensor | int = 0
        self.num_micro_steps = 0
        self.num_steps = 0
        self.run_total = 0.0
        self.run_steps = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add one micro-step's share of its step's loss: a detached 0-d tensor."""
        if self._filters:
            is_finite = loss.isfinite()
            self.num_nonfinite = self.num_nonfinite + (~is_finite).to(torch.int64)
            mean = 0.0 if self.sum is None else self.sum / self.num_micro_steps
            loss = torch.where(is_finite, loss, mean)
        self.sum = loss if self.sum is None else self.sum + loss
        self.num_micro_steps += 1

    def close_step(self) -> None:
        """Count one optimizer update."""
        self.num_steps += 1

    def read(self) -> dict[str, float]:
        """Return the window's mean loss per step and start a new window; synchronises, collective."""
        logs: dict[str, float] = {}
        if self.sum is not None and self.num_steps:
            total = float(self._reduce(self.sum))
            logs["loss"] = total / self.num_steps
            self.run_total += total
            self.run_steps += self.num_steps
        if num_nonfinite := int(self.num_nonfinite):
            logs["nonfinite_losses"] = num_nonfinite
            warn_once(
                "The loss was NaN or infinite at least once. logging_nan_inf_filter=True keeps it out of the logged "
                "mean; 'nonfinite_losses' in the logs counts it. Set logging_nan_inf_filter=False to see it."
            )
        self.sum = None
        self.num_steps = self.num_micro_steps = 0
        return logs

    def state_dict(self) -> dict[str, Any]:
        """Return everything summed so far, as tensors and plain numbers."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Go on from what `state_dict` returned; mutates the object."""
        for name, value in state.items():
            setattr(self, name, value.to(device) if isinstance(value, torch.Tensor) else value)

    def mean_over_run(self) -> float:
        """Return the mean loss per step of all readings so far (0 before the first step)."""
        return self.run_total / self.run_steps if self.run_steps else 0.0


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
            logs: Numbers by name.
            weight: How much they count in the mean: the samples they stand for.
        """
        for name, value in logs.items():
            value = (value.detach() if isinstance(value, torch.Tensor) else value) * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + weight

    def state_dict(self) -> dict[str, Any]:
        """Return what is summed up since the last reading, as tensors and plain numbers."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Go on from what `state_dict` returned; mutates the object."""
        self._sums = map_tensors(dict(state.get("sums", {})), lambda tensor: tensor.to(device))
        self._counts = dict(state.get("counts", {}))

    def read(self) -> dict[str, float]:
        """Return the means over steps and ranks and forget them; synchronises, collective."""
        mine = {name: (float(value), self._counts[name]) for name, value in self._sums.items()}
        self._sums, self._counts = {}, {}
        merged: dict[str, list[float]] = {}
        for per_rank in self._gather_object(mine):
            for name, (value, count) in per_rank.items():
                total = merged.setdefault(name, [0.0, 0])
                total[0] += value
                total[1] += count
        return {name: value / count for name, (value, count) in merged.items()}
