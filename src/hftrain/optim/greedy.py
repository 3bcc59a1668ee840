"""A schedule that raises the rate while a metric improves and lowers it while it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hftrain.optim.schedules import ScheduleConfig, by_metric


class GreedyLR(ReduceLROnPlateau):
    """Divide the rate by `factor` after a series of improvements, and multiply it after a series of failures.

    Args:
        optimizer: Mutated.
        mode: ``"min"`` or ``"max"``: what is better.
        factor: Below 1.
        patience: Consecutive values after which the next one changes the rate.
        threshold: By how much a value must beat the best one.
        threshold_mode: ``"rel"`` or ``"abs"``.
        cooldown: Values to ignore after the rate was lowered.
        warmup: Values to ignore after the rate was raised.
        min_lr: The lowest rate, for all groups or for each.
        max_lr: The highest rate, for all groups or for each.
        eps: Do not change the rate by this much or less.
        verbose: Print each change.
        smooth: Compare means over the last `window_size` values.
        window_size: See `smooth`.
        reset_start: Return to the initial rates after this many reductions at the lowest rate.

    Source: arXiv 2512.14527; the documented `GreedyLR` and ``lr_scheduler_type="greedy"``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Any = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: Any = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        super().__init__(optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps)
        num_groups = len(optimizer.param_groups)
        self.max_lrs = list(max_lr) if isinstance(max_lr, (list, tuple)) else [max_lr] * num_groups
        if len(self.max_lrs) != num_groups:
            raise ValueError(f"max_lr has {len(self.max_lrs)} values for {num_groups} parameter groups")
        self.warmup = warmup
        self.warmup_counter = 0
        self.num_good_epochs = 0
        self.verbose = verbose
        self.smooth = smooth
        self.window_size = window_size
        self.reset_start = self.reset_start_original = reset_start
        self._window: list[float] = []
        self._init_lrs = [float(group["lr"]) for group in optimizer.param_groups]

    def step(self, metrics: SupportsFloat, epoch: int | None = None) -> None:  # type: ignore[override]
        """Compare a value with the best so far, and change the rate if a change is due."""
        value = float(metrics)
        if self.smooth:
            self._window = [*self._window, value][-self.window_size :]
            value = sum(self._window) / len(self._window)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter or self.warmup_counter:
            waiting = "cooldown_counter" if self.cooldown_counter else "warmup_counter"
            setattr(self, waiting, getattr(self, waiting) - 1)
            self.num_bad_epochs = self.num_good_epochs = 0
        else:
            self._count(value)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _count(self, value: float) -> None:
        is_better = bool(self._is_better(value, self.best))  # type: ignore[no-untyped-call]
        self.best = value if is_better else self.best
        self.num_good_epochs = self.num_good_epochs + 1 if is_better else 0
        self.num_bad_epochs = 0 if is_better else self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._move(1 / self.factor, self.max_lrs, min)
            self.warmup_counter, self.num_good_epochs = self.warmup, 0
            self.reset_start = self.reset_start_original
        elif self.num_bad_epochs > self.patience:
            self._move(self.factor, self.min_lrs, max)
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            if all(rate <= low for rate, low in zip(rates, self.min_lrs, strict=True)):
                self.reset_start -= 1
                if self.reset_start <= 0:
                    self._start_again()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def _move(self, factor: float, bounds: list[float], bounded: Callable[[float, float], float]) -> None:
        """Multiply the rates within the bounds; a rate that is already beyond a bound stays."""
        for number, (group, bound) in enumerate(zip(self.optimizer.param_groups, bounds, strict=True)):
            old = float(group["lr"])
            new = bounded(old * factor, bound)
            if (new - old if factor > 1 else old - new) > self.eps:
                group["lr"] = new
                if self.verbose:
                    print(f"Learning rate of group {number}: {new:.4e}")

    def _start_again(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._init_lrs, strict=True):
            group["lr"] = rate
        self._reset()
        self.num_good_epochs = self.warmup_counter = 0
        self.reset_start = self.reset_start_original
        self._window = []


def greedy(config: ScheduleConfig, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule named ``"greedy"``."""
    return by_metric(config, optimizer, kind=GreedyLR)
