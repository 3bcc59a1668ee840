"""Which checkpoints are older than others, and which are too many."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from hftrain.checkpoint.manifest import Manifest

T = TypeVar("T")


def commit_order(manifest: Manifest | None, *, step: int) -> tuple[float, int]:
    """Return what sorts checkpoints as they were committed; those without a manifest that can be read come last.

    Within a run that is the order of steps; after a run was begun again in its folder, or resumed from an older
    checkpoint, higher steps may belong to the abandoned one.
    """
    saved_at_s = math.inf if manifest is None else manifest.facts.get("saved_at_s", 0.0)
    return saved_at_s if isinstance(saved_at_s, (int, float)) else math.inf, step


def surplus(known: Sequence[T], *, protected: Collection[T], limit: int) -> Sequence[T]:
    """Return what to delete of `known`, the oldest first, so that `limit` stay, at least 1, and all `protected`."""
    others = [each for each in known if each not in protected]
    num_kept = len(known) - len(others)
    return others[: max(0, len(known) - max(limit, num_kept))]


def best_names(manifests: Mapping[str, Manifest], *, number: int | None, is_greater_better: bool) -> set[str]:
    """Return the names of the checkpoints with the best metrics, None for none; of equal ones the earlier.

    Those without the fact ``metric`` are not among the best.
    """
    scored = [
        (-metric if is_greater_better else metric, manifest.step, name)
        for name, manifest in manifests.items()
        if isinstance(metric := manifest.facts.get("metric"), (int, float))
    ]
    return {name for _, _, name in sorted(scored)[: number or 0]}
