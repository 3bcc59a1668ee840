"""The order of checkpoints, and which ones to delete."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hftrain.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_name,
    checkpoint_names,
    checkpoint_step,
    read_manifest,
)
from hftrain.core.errors import CheckpointError
from hftrain.storage.files import discard

T = TypeVar("T")


class UnreachableError(CheckpointError):
    """A store cannot be used; its checkpoints may be intact."""


class Checkpoints(ABC):
    """The checkpoints of one folder, by name; each manifest is read only once.

    Changes by other programs are not noticed, except before a checkpoint is deleted.
    """

    def __init__(self) -> None:
        self._cache: dict[str, Manifest] = {}

    @abstractmethod
    def names(self) -> list[str]:
        """List the folders with names of checkpoints."""

    @abstractmethod
    def read(self, name: str) -> Manifest | None:
        """Return a checkpoint's manifest, None if it is missing, damaged or of another step."""

    @abstractmethod
    def remove(self, name: str, run_id: str) -> None:
        """Delete a checkpoint of a run; failures only warn."""

    def manifests(self) -> dict[str, Manifest | None]:
        """Map checkpoints to their manifests, without the file records, in commit order; see `commit_order`."""
        found = {name: self._cache.get(name) or self.read(name) for name in self.names()}
        self._cache = {}
        for name, manifest in found.items():
            self.note(name, manifest)
        return {name: self._cache.get(name) for name, _ in sorted(found.items(), key=lambda each: commit_order(*each))}

    def own(self, run_id: str) -> dict[str, Manifest]:
        """Map a run's checkpoints to their manifests, in commit order."""
        found = self.manifests().items()
        return {name: manifest for name, manifest in found if manifest and manifest.facts.get("run_id") == run_id}

    def highest_number(self) -> int:
        """Return the highest ``commit_number``, 0 if no checkpoint has one."""
        return max((each.facts.get("commit_number", 0) for each in self.manifests().values() if each), default=0)

    def rotate(self, run_id: str, limit: int | None, kept: Callable[[Mapping[str, Manifest]], set[str]]) -> None:
        """Delete a run's oldest checkpoints beyond the limit.

        Args:
            run_id: The run's id; other runs' checkpoints are kept.
            limit: How many are kept; None, or a number below 1, keeps all.
            kept: Returns the names of those that are kept regardless of the limit, given all of the run's.
        """
        if limit is not None and limit > 0:
            manifests = self.own(run_id)
            for name in surplus([*manifests], protected=kept(manifests), limit=limit):
                self.delete(name, run_id)

    def delete(self, name: str, run_id: str) -> None:
        """Delete a checkpoint, unless another program has replaced it by one of another run."""
        self.note(name, None)
        now = self.read(name)
        if now is not None and now.facts.get("run_id") == run_id:
            self.remove(name, run_id)

    def note(self, name: str, manifest: Manifest | None) -> None:
        """Store the manifest of a checkpoint that was just written; None removes it."""
        if manifest is None:
            self._cache.pop(name, None)
        else:
            self._cache[name] = replace(manifest, files={}) if manifest.files else manifest


class LocalCheckpoints(Checkpoints):
    """The checkpoints of a local folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def names(self) -> list[str]:
        return checkpoint_names(self.folder)

    def read(self, name: str) -> Manifest | None:
        manifest = readable(self.folder / name)
        return manifest if manifest is not None and manifest.step == checkpoint_step(name) else None

    def remove(self, name: str, run_id: str) -> None:
        discard(self.folder / name)

    def own(self, run_id: str) -> dict[str, Manifest]:
        """Map a run's checkpoints, without links, to their manifests, in commit order."""
        folders = {*checkpoint_names(self.folder, with_links=False)}
        return {name: manifest for name, manifest in super().own(run_id).items() if name in folders}


def by_commit(output_dir: Path) -> list[Path]:
    """List the folders with names of checkpoints in commit order; see `commit_order`."""
    return [output_dir / name for name in LocalCheckpoints(output_dir).manifests()]


def readable(folder: Path) -> Manifest | None:
    """Return a checkpoint's manifest, None if it is missing or damaged."""
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def commit_order(name: str, manifest: Manifest | None) -> tuple[float, float, int]:
    """Return a sort key for commit order; checkpoints without a readable manifest come last.

    The fact ``commit_number`` decides, independently of clocks. Earlier versions wrote none: their checkpoints come
    before the others, by time. Steps do not decide: if a run was restarted in its folder, or resumed from an older
    checkpoint, higher steps may belong to the abandoned run.
    """
    step = checkpoint_step(name) or 0
    if manifest is None:
        return math.inf, math.inf, step
    return manifest.facts.get("commit_number", 0), manifest.facts.get("saved_at_s", 0.0), step


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
    """Return the names of the planned checkpoints with the best metrics, of equals the earlier; none for `number` None.

    Args:
        manifests: In commit order. A checkpoint whose evaluation came after it has its metric in later manifests.
    """
    metrics: dict[str, Any] = {}
    for name, manifest in manifests.items():
        metrics |= {name: manifest.facts.get("metric"), **manifest.facts.get("earlier_metrics", {})}
    scores = [
        (-metric if is_greater_better else metric, manifest.step, name)
        for name, manifest in manifests.items()
        if manifest.is_planned and isinstance(metric := metrics[name], (int, float))
    ]
    return {name for _, _, name in sorted(scores)[: number or 0]}


class Uncommitted:
    """Checkpoints that an override of `_save_checkpoint` writes without the base method, and so without a manifest."""

    def __init__(self, output_dir: Path, *, deletes: bool) -> None:
        self._output_dir, self._deletes = output_dir, deletes
        # In the order of their writing.
        self._folders: list[Path] = []

    def note(self, step: int) -> None:
        """Note the folder of a step, if there is one without a manifest."""
        folder = self._output_dir / checkpoint_name(step)
        if folder.is_dir() and not (folder / MANIFEST).exists():
            self._folders = [*(each for each in self._folders if each != folder), folder]

    def rotate(self, limit: int | None, *, best: Path | None, keeps_newest: bool = True) -> None:
        """Delete the oldest beyond the limit, but neither the best nor the newest."""
        if limit is None or limit < 1 or not self._deletes:
            return
        protected = {each for each in self._folders if best is not None and each.resolve() == best.resolve()}
        protected |= {*self._folders[-1:]} if keeps_newest else set()
        for folder in surplus(self._folders, protected=protected, limit=limit):
            self._folders.remove(folder)
            if not (folder / MANIFEST).exists():
                discard(folder)
