"""Which checkpoints are older than others, and which are too many."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hftrain.checkpoint.layout import checkpoint_names, checkpoint_step
from hftrain.checkpoint.manifest import Manifest, read_manifest
from hftrain.core.errors import CheckpointError

T = TypeVar("T")


class Manifests:
    """The manifests of one folder's checkpoints, each read once however often they are asked for.

    A manifest that another program replaces goes unnoticed: read it again before you delete what it belongs to.

    Args:
        read: Returns a checkpoint's manifest by the folder's name, None if it cannot be trusted.
    """

    def __init__(self, read: Callable[[str], Manifest | None]) -> None:
        self._read = read
        self._known: dict[str, Manifest] = {}

    def of(self, names: Iterable[str]) -> dict[str, Manifest | None]:
        """Map checkpoints to their manifests, without the records of files, in the order of their commits."""
        found = {name: self._known.get(name) or self._read(name) for name in names}
        self._known = {}
        for name, manifest in found.items():
            self.note(name, manifest)
        return {name: self._known.get(name) for name in sorted(found, key=lambda name: _order(name, found[name]))}

    def note(self, name: str, manifest: Manifest | None) -> None:
        """Remember the manifest of a checkpoint that was just written; None forgets it."""
        if manifest is None:
            self._known.pop(name, None)
        else:
            self._known[name] = replace(manifest, files={}) if manifest.files else manifest


def by_commit(output_dir: Path) -> list[Path]:
    """List the folders that are named like checkpoints as they were committed; see `commit_order`."""
    manifests = Manifests(lambda name: readable(output_dir / name))
    return [output_dir / name for name in manifests.of(checkpoint_names(output_dir))]


def readable(folder: Path) -> Manifest | None:
    """Return a checkpoint's manifest, None if it is absent or damaged."""
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def commit_order(manifest: Manifest | None, *, step: int) -> tuple[float, float, int]:
    """Return what sorts checkpoints as they were committed; those without a manifest that can be read come last.

    The fact ``commit_number`` decides, whatever clocks said. Earlier versions wrote none: their checkpoints come before
    the others, by time. Steps decide nothing: after a run was begun again in its folder, or resumed from an older
    checkpoint, higher steps may belong to the abandoned one.
    """
    if manifest is None:
        return math.inf, math.inf, step
    return manifest.facts.get("commit_number", 0), manifest.facts.get("saved_at_s", 0.0), step


def highest_number(manifests: Mapping[str, Manifest | None]) -> int:
    """Return the highest ``commit_number``, 0 if no checkpoint has one."""
    return max((each.facts.get("commit_number", 0) for each in manifests.values() if each is not None), default=0)


def _order(name: str, manifest: Manifest | None) -> tuple[float, float, int]:
    return commit_order(manifest, step=checkpoint_step(name) or 0)


def surplus(known: Sequence[T], *, protected: Collection[T], limit: int) -> Sequence[T]:
    """Return what to delete of `known`, the oldest first, so that `limit` stay, at least 1, and all `protected`."""
    others = [each for each in known if each not in protected]
    return others[: max(0, len(known) - limit)]


def finite_of(run_id: str) -> Callable[[Manifest], bool]:
    """Return what tells whether a run of this name can go back to a checkpoint: a complete one that is finite."""
    return lambda manifest: manifest.is_finite and not manifest.only_model and manifest.facts.get("run_id") == run_id


def last_finite_name(manifests: Mapping[str, Manifest]) -> set[str]:
    """Return the name of the last checkpoint, in the mapping's order, that is finite; empty if none is."""
    return {*[name for name, manifest in manifests.items() if manifest.is_finite][-1:]}


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
