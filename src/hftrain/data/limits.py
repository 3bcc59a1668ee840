"""How many batches a Trainer reads: all of them, unless a setting says fewer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.extras import extra


class Limits:
    """Read every batch; `hftrain.extras.limits` has the limits of a Trainer that sets one.

    Attributes:
        facts: The settings that leave data out, in plain values; checkpoints and reports name them.
        of_training: The setting that decides what a run is trained on, if there is one; a resume compares it.
        of_evaluation: That of evaluations, likewise.
        sanity_eval_batches: How many batches of each set are evaluated before the first step.
    """

    facts: Mapping[str, int | float] = {}
    of_training: Mapping[str, int | float] = {}
    of_evaluation: Mapping[str, int | float] = {}
    sanity_eval_batches = 0

    def num_train(self, num_batches: int | None) -> int | None:
        """Return the batches in a pass of one process, of as many as its loader has (None: unknown)."""
        return num_batches

    def for_evaluation(self, loader: Any) -> Any:
        """Return the part of an evaluation loader that is read."""
        return loader


def make_limits(**settings: int | float | None) -> Limits:
    """Return the limits of a Trainer, from its settings whose names end with ``_batches``."""
    is_limited = any(value is not None for value in settings.values())
    limits: Limits = extra("limits").SetLimits(**settings) if is_limited else Limits()
    return limits


def first_batches(loader: Any, number: int) -> Any:
    """Return a loader of the first batches of an evaluation loader, or the loader itself if `number` is 0."""
    return extra("limits").FirstBatches(loader, number) if number else loader
