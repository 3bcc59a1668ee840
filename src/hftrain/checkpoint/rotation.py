"""The order of checkpoints, and which ones to delete."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hftrain.checkpoint.layout import MANIFEST, checkpoint_name, checkpoint_names, checkpoint_step
from hftrain.checkpoint.manifest import Manifest, read_manifest
from hftrain.core.errors import CheckpointError
from hftrain.storage.files import discard

T = TypeVar("T")


class Manifests:
    """The manifests of one folder's checkpoints, each read only once.

    Changes by other programs are not noticed: read a manifest again before you delete its checkpoint.

    Args:
        read: Returns a checkpoint's manifest by the folder's name, None if it is not valid.
    """

    def __init__(self, read: Callable[[str], Manifest | None]) -> None:
        self._read = read
        self._known: dict[str, Manifest] = {}

    def of(self, names: Iterable[str]) -> dict[str, Manifest | None]:
        """Map checkpoints to their manifests, without the file records, in commit order."""
        found = {name: self._known.get(name) or self._read(name) for name in names}
        self._known = {}
        for name, manifest in found.items():
            self.note(name, manifest)
        return {name: self._known.get(name) for name in sorted(found, key=lambda name: _order(name, found[name]))}

    def note(self, name: str, manifest: Manifest | None) -> None:
        """Store the manifest of a checkpoint that was just written; None removes it."""
        if manifest is None:
            self._known.pop(name, None)
        else:
            self._known[name] = replace(manifest, files={}) if manifest.files else manifest


def by_commit(output_dir: Path) -> list[Path]:
    """List the folders with names of checkpoints in commit order; see `commit_order`."""
    manifests = Manifests(lambda name: readable(output_dir / name))
    return [output_dir / name for name in manifests.of(checkpoint_names(output_dir))]


def readable(folder: Path) -> Manifest | None:
    """Return a checkpoint's manifest, None if it is missing or damaged."""
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def commit_order(manifest: Manifest | None, *, step: int) -> tuple[float, float, int]:
    """Return a sort key for commit order; checkpoints without a readable manifest come last.

    The fact ``commit_number`` decides, independently of clocks. Earlier versions wrote none: their checkpoints come
    before the others, by time. Steps do not decide: if a run was restarted in its folder, or resumed from an older
    checkpoint, higher steps may belong to the abandoned run.
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
    """Return the oldest of `known` to delete, so that `limit` (at least 1) remain, and all `protected`."""
    others = [each for each in known if each not in protected]
    return others[: max(0, len(known) - limit)]


def finite_of(run_id: str) -> Callable[[Manifest], bool]:
    """Return a filter for checkpoints that the run can restore: its own, with optimizer, and finite."""
    return lambda manifest: manifest.is_finite and not manifest.only_model and manifest.facts.get("run_id") == run_id


def last_finite_name(manifests: Mapping[str, Manifest]) -> set[str]:
    """Return the name of the last finite checkpoint, in the mapping's order, as a set; empty if there is none."""
    return {*[name for name, manifest in manifests.items() if manifest.is_finite][-1:]}


def best_names(manifests: Mapping[str, Manifest], *, number: int | None, is_greater_better: bool) -> set[str]:
    """Return the names of the checkpoints with the best metrics; ties go to the earlier. `number` None returns none.

    Args:
        manifests: In commit order. A checkpoint whose evaluation came after it has its metric in later manifests.
    """
    metrics: dict[str, Any] = {}
    for name, manifest in manifests.items():
        metrics |= {name: manifest.facts.get("metric"), **manifest.facts.get("earlier_metrics", {})}
    scored = [
        (-metric if is_greater_better else metric, manifest.step, name)
        for name, manifest in manifests.items()
        if isinstance(metric := metrics[name], (int, float))
    ]
    return {name for _, _, name in sorted(scored)[: number or 0]}


class Uncommitted:
    """Checkpoints that an override of `_save_checkpoint` writes without the base method, and so without a manifest.

    Args:
        output_dir: Where they are.
        deletes: Whether this process deletes the oldest.
    """

    def __init__(self, output_dir: Path, *, deletes: bool) -> None:
        self._output_dir, self._deletes = output_dir, deletes
        # In the order of their writing.
        self._found: list[Path] = []

    def note(self, step: int) -> None:
        """Note the folder of a step, if there is one without a manifest."""
        folder = self._output_dir / checkpoint_name(step)
        if folder.is_dir() and not (folder / MANIFEST).exists():
            self._found = [*(each for each in self._found if each != folder), folder]

    def rotate(self, limit: int | None, *, best: Path | None, keeps_newest: bool = True) -> None:
        """Delete the oldest beyond the limit, but neither the best nor the newest."""
        if limit is None or limit < 1 or not self._deletes:
            return
        protected = {each for each in self._found if best is not None and each.resolve() == best.resolve()}
        protected |= {*self._found[-1:]} if keeps_newest else set()
        for folder in surplus(self._found, protected=protected, limit=limit):
            self._found.remove(folder)
            if not (folder / MANIFEST).exists():
                discard(folder)
