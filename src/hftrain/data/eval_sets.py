"""Several named evaluation sets, each with its own metrics and interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.state import TrainerState


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One of several evaluation sets, as a value of the dict given as `eval_dataset`.

    During training, a set is evaluated at those evaluations of the run that its interval includes. Calling `evaluate()`
    directly evaluates every set, and so does `eval_on_start`.

    Args:
        dataset: The data.
        every: Optimizer steps (``eval_strategy="steps"``) or epochs (``"epoch"``) between its evaluations; None takes
            part in each. In steps, a multiple of `eval_steps`.
        metrics: ``f(EvalPrediction) -> dict`` in place of `compute_metrics`.

    Raises:
        ConfigError: `every` is not a positive whole number, or there is no dataset.

    Example:
        >>> EvalSet([1, 2], every=500).every
        500
    """

    dataset: Any
    every: int | None = None
    metrics: Callable[..., Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.dataset is None:
            raise ConfigError("Cannot make an EvalSet.", "It has no dataset.", "Pass the data as its first argument.")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError(
                "Cannot make an EvalSet with its own schedule.",
                "Steps or passes are counted in positive whole numbers.",
                "Give a multiple of eval_steps, or a number of passes.",
                every=self.every,
            )


def split_eval_sets(eval_dataset: Any) -> tuple[Any, dict[str, EvalSet]]:
    """Return the datasets without their `EvalSet` wrappers, and the wrappers by name."""
    if isinstance(eval_dataset, EvalSet):
        raise ConfigError(
            "Cannot use an EvalSet as eval_dataset.",
            "It has no name for its metrics.",
            "Pass a dict: eval_dataset={'name': EvalSet(...)}.",
        )
    if not isinstance(eval_dataset, Mapping):
        return eval_dataset, {}
    sets = {name: entry for name, entry in eval_dataset.items() if isinstance(entry, EvalSet)}
    if not sets:
        return eval_dataset, {}
    return {name: sets[name].dataset if name in sets else data for name, data in eval_dataset.items()}, sets


def is_due(entry: EvalSet | None, state: TrainerState, *, by_epoch: bool) -> bool:
    """Return whether a set takes part in the current evaluation of a run.

    Args:
        entry: None for a set without its own interval.
        by_epoch: Whether the interval counts epochs, else optimizer steps.
    """
    if entry is None or entry.every is None:
        return True
    if by_epoch:
        epoch = state.epoch or 0.0
        return abs(epoch - round(epoch)) < 1e-6 and round(epoch) % entry.every == 0
    return state.global_step % entry.every == 0
