"""Change how many micro-batches a step accumulates while a run goes on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.types import Owns


class GradientAccumulationScheduler(TrainerCallback):
    """Accumulate more or fewer micro-batches from an update on, so that the batch grows or shrinks during a run.

    Updates are counted as always, so the schedule of the learning rate and `max_steps` stay. A resumed run continues
    exactly. Every loss is the mean over the items of its step, whatever their number.

    Args:
        scheduling: The number of micro-batches by the update from which it holds; the first one holds from 0.

    Raises:
        ConfigError: Numbers are not positive, none holds at first, `gradient_accumulation_steps` is not their largest,
            or the run's length is not `max_steps`.
        StrategyError: The strategy accumulates itself (DeepSpeed).

    Example:
        >>> callback = GradientAccumulationScheduler({0: 1, 500: 2, 2000: 8})
        >>> callback.number_at(0), callback.number_at(1999), callback.number_at(5000)
        (1, 2, 8)
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        self._changes = sorted(scheduling.items())
        if min([0, *scheduling]) < 0 or min(scheduling.values(), default=0) < 1 or 0 not in scheduling:
            raise ConfigError(
                f"Cannot schedule the accumulation by {dict(scheduling)}.",
                "It maps updates, the first of which is 0, to numbers of micro-batches, which are at least 1.",
                "Write it like {0: 1, 500: 4}.",
            )

    def number_at(self, step: int) -> int:
        """Return how many micro-batches the update after `step` accumulates."""
        return self._changes[bisect_right(self._changes, step, key=lambda change: change[0]) - 1][1]

    def wrap_stepper(self, stepper: Any, *, strategy: Any, **_: Any) -> Any:
        """Refuse strategies whose engine accumulates."""
        if Owns.ACCUMULATION in strategy.owns:
            raise StrategyError(
                f"Cannot schedule the accumulation with strategy={strategy.name!r}.",
                "Its engine accumulates a number of micro-batches that is fixed when it is built.",
                "Use another strategy, or a constant gradient_accumulation_steps.",
            )
        return stepper

    def wrap_parts(self, parts: Any) -> Any:
        """Take as many micro-batches as the schedule says."""
        config, get_samples = parts.config, parts.hooks.get_batch_samples
        largest = max(number for _, number in self._changes)
        if config.accumulation != largest:
            raise ConfigError(
                f"Cannot schedule the accumulation with gradient_accumulation_steps={config.accumulation}.",
                "That is not the largest number of the schedule.",
                f"Set gradient_accumulation_steps={largest}.",
            )
        if config.num_epochs is not None:
            raise ConfigError(
                "Cannot schedule the accumulation of a run whose length is in epochs.",
                "Its updates would be planned with one number of micro-batches.",
                "Set max_steps, a number of updates.",
            )

        def get_scheduled(batches: Any, _: int, device: Any) -> Any:
            return get_samples(batches, self.number_at(parts.progress.step), device)

        # For the loop a step of any size is whole.
        return replace(
            parts,
            config=replace(config, accumulation=1),
            hooks=replace(parts.hooks, get_batch_samples=get_scheduled),
        )
