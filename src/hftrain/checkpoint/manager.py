"""The commit protocol: every checkpoint of a run is complete or does not exist."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hftrain.checkpoint.manifest import (
    MANIFEST,
    TRAINER_STATE,
    Manifest,
    checkpoint_name,
    checkpoint_step,
    contents,
    nearby,
    refuse_links,
    refuse_uncommitted,
    verify,
    write_manifest,
)
from hftrain.checkpoint.rotation import LocalCheckpoints, UnreachableError, best_names, by_commit, last_finite_name
from hftrain.checkpoint.state_files import Writer
from hftrain.core.errors import CheckpointError, ConfigError, explain
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.preemption.consensus import Group
from hftrain.storage import files, hashing
from hftrain.storage.files import free_bytes, is_disk_full
from hftrain.storage.locks import FolderLock

logger = get_logger(__name__)


class NoSpaceError(CheckpointError):
    """A checkpoint could not be written because the disk is full; the earlier ones are intact."""


class CheckpointManager:
    """Write, find, verify and rotate the checkpoints of one run, which owns its output folder.

    Args:
        group: The processes that call `save` together.
        save_total_limit: How many are kept; None, or a number below 1, keeps all.
        only_model: Whether to leave out what only a resume needs.
        on_each_node: Whether each machine writes to its own storage.
        url: The remote folder where the checkpoints are kept; `output_dir` is then its local mirror.
        keep_best: How many with the best metrics are kept in addition to the newest; without a limit, no others are.
        uploads: Transfers files if machines do not share the mirror of a remote folder.

    Source: the documented `output_dir`, `save_total_limit`, `save_only_model`, `save_on_each_node`.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        group: Group,
        save_total_limit: int | None = None,
        only_model: bool = False,
        on_each_node: bool = False,
        url: str | None = None,
        keep_best: int | None = None,
        is_greater_better: bool = False,
        uploads: Any = None,
    ) -> None:
        self.output_dir, self.group, self.url = output_dir, group, url
        self.save_total_limit, self.only_model, self.on_each_node = save_total_limit, only_model, on_each_node
        self._keep_best, self._is_greater_better = keep_best, is_greater_better
        self.lock = FolderLock(output_dir)
        # A resumed run keeps its id; rotation does not touch checkpoints of other runs.
        self.run_id = uuid.uuid4().hex
        self.local = LocalCheckpoints(output_dir)
        # The highest known commit number; None until the folder has been read.
        self._commit_number: int | None = None
        self._resumed_number = 0
        self.remote = None if url is None else extra("remote_checkpoints").RemoteCheckpoints(url, mirror=output_dir)
        self._uploads = uploads
        self._last_published: Path | None = None
        self._hashes: dict[hashing.Mark, str] = {}

    def save(
        self,
        step: int,
        writers: Sequence[Writer],
        *,
        facts: Mapping[str, Any],
        group: Group | None = None,
    ) -> Path:
        """Write the checkpoint of a step; collective, and durable on return.

        The final name does not exist until every process has written its part. A checkpoint of the same
        step is replaced.

        Args:
            writers: What this process writes, in files of its own; each is called with the folder to write to.
                Collective ones come first: no process may wait for one that has failed.
            facts: What the manifest records in addition to the files: numbers, text, lists and dictionaries.
            group: How the processes agree; by default the manager's group, which uses collectives.

        Returns:
            The checkpoint's folder.

        Raises:
            NoSpaceError: A disk or a quota is full, and nothing else is wrong anywhere.
            CheckpointError: A writer or the commit failed on any process; the earlier checkpoints are intact. The
                cause is attached on the process where it happened.
        """
        target = self.output_dir / checkpoint_name(step)
        group = group or self.group
        if self.is_committer:
            logger.info("Saving model checkpoint to %s", target)
        self._run_stage(target, self._make_staging, group, is_for_main=self._uploads is None)
        self._run_stage(target, lambda path: self._write(path, writers), group)
        if self._uploads is not None:
            self._run_stage(target, lambda path: self._send_uploads(path, step), group)
        self._run_stage(target, lambda path: self._publish(path, step, facts), group, is_for_main=True)
        self._last_published = target
        return target

    def follow(self, manifest: Manifest) -> None:
        """Continue the run of a checkpoint in any folder: take its run id, and commit numbers above its number."""
        self.run_id = manifest.facts["run_id"]
        self._resumed_number = manifest.facts.get("commit_number", 0)

    def claim(self) -> None:
        """Keep other runs from saving to the folder, until `lock` is released or the process ends. Collective.

        Leftovers of killed saves are restored or deleted, and the existing checkpoints are read.

        Raises:
            ConfigError: Another run saves there.
        """
        if self.group.all_true(not self.is_committer or self.lock.take()):
            if self.is_committer:
                self._sweep()
            return
        owner, remedy = "Another run", "Give each run its own output_dir, or wait until the other run has ended."
        if self.on_each_node:
            owner += ", or another machine of this one,"
            remedy += " On storage that machines share leave save_on_each_node out."
        reason = f"{owner} is saving there; each would delete what the other is writing."
        raise ConfigError(f"Cannot save checkpoints to {self.output_dir}.", reason, remedy)

    @property
    def is_committer(self) -> bool:
        """Whether this process commits: the main one, or with `on_each_node` one per machine."""
        return self.group.is_local_main if self.on_each_node else self.group.is_main

    def latest(
        self,
        is_asked_for: Callable[[Manifest], bool] = lambda manifest: True,
        check_uncommitted: Writer = refuse_uncommitted,
    ) -> Path | None:
        """Return the newest intact checkpoint, or None; a warning lists those that were skipped.

        Not collective: only the main process calls it. It reads every byte of the result, and first restores a
        checkpoint that a killed save had set aside. The functions select by a manifest, and among those without one.
        """
        if self.group.is_main:
            self.lock.wait_for_writer()
            files.restore(self.output_dir, is_ours=_is_ours)
        if self.remote is not None:
            checkpoint: Path | None = self.remote.latest(is_asked_for)
            return checkpoint
        for path in reversed(by_commit(self.output_dir)):
            try:
                if not (path / MANIFEST).exists():
                    check_uncommitted(path)
                    return path
                if is_asked_for(verify(path)):
                    return path
            except CheckpointError as error:
                logger.warning("Skipped %s when looking for the newest checkpoint: %s", path, error)
        return None

    def names(self) -> list[str]:
        """List the folders with names of checkpoints in the output folder, or the remote one."""
        return (self.remote or self.local).names()

    @staticmethod
    def open(path: str | Path) -> Manifest | None:
        """Verify a checkpoint given by its path, and return its manifest.

        Returns None, with a warning, for one of the Hugging Face Trainer, which cannot be verified.

        Raises:
            CheckpointError: It is damaged, or not a checkpoint.
        """
        path = Path(path)
        if (path / MANIFEST).exists():
            return verify(path)
        if (path / TRAINER_STATE).is_file():
            refuse_links(path)
            logger.warning("%s has no %s: its files are read as they are, without proof.", path, MANIFEST)
            return None
        raise CheckpointError(f"Cannot resume from {path}.", f"It is not a checkpoint: {contents(path)}.", nearby(path))

    def own_checkpoints(self) -> list[Path]:
        """List this run's checkpoints in the order of their commits."""
        return [self.output_dir / name for name in self.local.own(self.run_id)]

    def rotate(self, *, best: Path | None = None) -> None:
        """Delete the oldest checkpoints beyond the limit; only the main process does this, others do nothing.

        The newest, the last finite one, the best and the one committed last are always kept, and so is every folder
        without a readable manifest.
        """
        if not self.is_committer:
            return
        limit = self.save_total_limit
        if limit is None and self._keep_best is not None:
            limit = 1  # the newest one; the best are protected
        if self.remote is not None:
            self.remote.rotate(self.run_id, limit, lambda manifests: self._protected(manifests, best))
            limit = 1  # of the local copies
        self.local.rotate(self.run_id, limit, lambda manifests: self._protected(manifests, best))

    def _protected(self, manifests: Mapping[str, Manifest], best: Path | None) -> set[str]:
        """Return the newest, the last finite ones, the best, the one committed last, and those `keep_best` keeps."""
        # A run goes back to it, as it would if it had never been interrupted.
        last_planned = last_finite_name({name: each for name, each in manifests.items() if each.is_planned})
        top = best_names(manifests, number=self._keep_best, is_greater_better=self._is_greater_better)
        newest = {*[*manifests][-1:]}
        return self._local_names(best, self._last_published) | newest | top | last_finite_name(manifests) | last_planned

    def _local_names(self, *paths: Path | None) -> set[str]:
        folder = self.output_dir.resolve()
        return {path.name for path in paths if path is not None and path.resolve().parent == folder}

    def prune(self, needed_bytes: int, *, best: Path | None = None) -> bool:
        """Delete this run's oldest checkpoints, at least one, until there is space; return whether any was deleted.

        Only for the committer. Keeps the newest, the last finite one, the best and those of `keep_best`.
        """
        manifests = self.local.own(self.run_id) if self.is_committer else {}
        protected = self._protected(manifests, best)
        has_deleted = False
        for name in manifests:
            if name in protected or (has_deleted and free_bytes(self.output_dir) >= needed_bytes):
                continue
            self.local.delete(name, self.run_id)
            has_deleted = has_deleted or not (self.output_dir / name).exists()
        return has_deleted

    def _sweep(self) -> None:
        try:
            files.sweep(self.output_dir, is_ours=_is_ours)
        except OSError as error:
            logger.warning("Could not delete what a killed save left behind: %s", error)
        with suppress(OSError, UnreachableError):  # if it occurs again, the first save raises it
            self._last_number()

    def keep_only(self, path: Path) -> None:
        """Delete all other checkpoints at the end of a run, if this one is intact; only for the main process.

        The last finite one is kept if this one is not finite.

        Source: the documented `save_total_limit=1` if the best checkpoint is not the last.
        """
        if not self.is_committer:
            return
        names = self._local_names(path)
        if not (self.local.own(self.run_id).keys() - names or self.remote):
            return
        try:
            is_finite = verify(path).is_finite
        except CheckpointError as error:
            logger.warning("Kept all checkpoints, for the one to keep is not whole: %s", error)
            return

        def survivors_among(manifests: Mapping[str, Manifest]) -> set[str]:
            survivors = names if names <= manifests.keys() else {*manifests}
            return survivors if is_finite else survivors | last_finite_name(manifests)

        for each in (self.local, self.remote):
            if each is not None:  # the remote folder may contain more than the local one
                each.rotate(self.run_id, 1, survivors_among)

    def _make_staging(self, target: Path) -> None:
        if self._uploads is not None and self.is_committer:
            self._uploads.clear()
        elif self._uploads is not None and not self._uploads.is_sender:
            return
        files.sweep(target.parent, is_ours=_is_ours)
        files.begin(target)

    def _write(self, target: Path, writers: Sequence[Writer]) -> None:
        staged = files.find_staging(target)
        with hashing.noting() as self._hashes:
            for writer in writers:
                writer(staged)
        files.fsync_tree(staged)  # on shared storage each machine can only flush what it wrote

    def _send_uploads(self, target: Path, step: int) -> None:
        if self._uploads is not None and self._uploads.is_sender:
            self._uploads.send(files.find_staging(target), step=step)

    def _publish(self, target: Path, step: int, facts: Mapping[str, Any]) -> None:
        staged = files.copy_user_files(target, files.find_staging(target), unless=(MANIFEST, TRAINER_STATE))
        # Rounded: of all digits, the last ones may change without another value, and so without another checksum.
        entries = {"only_model": self.only_model, "run_id": self.run_id, "saved_at_s": round(time.time(), 3)}
        entries["commit_number"] = self._commit_number = self._last_number() + 1
        if self._uploads is not None:
            self._uploads.collect(staged)
        manifest = write_manifest(staged, {**facts, **entries}, step=step, hashes=self._hashes)
        files.commit(staged, target)
        self.local.note(target.name, manifest)
        if self.remote is not None:
            self.remote.publish(target, run_id=self.run_id)

    def _last_number(self) -> int:
        """Return the highest commit number in the folder, which only this run writes, and in the remote one."""
        if self._commit_number is None:
            remote_number = 0 if self.remote is None else self.remote.highest_number()
            self._commit_number = max(self.local.highest_number(), remote_number)
        return max(self._commit_number, self._resumed_number)

    def _run_stage(self, target: Path, work: Writer, group: Group, *, is_for_main: bool = False) -> None:
        """Run one stage on every process, and raise on all of them if it failed on one."""
        failure: Exception | None = None
        try:
            if self.is_committer or not is_for_main:
                work(target)
        except Exception as error:
            failure = error
        if group.all_true(failure is None):
            return
        try:
            if self.is_committer:
                files.sweep(target.parent, is_ours=_is_ours)
        finally:
            lacks_space = group.all_true(failure is None or is_disk_full(failure))
        reason = "Another process failed; see its error."
        if failure is not None:
            prefix = "The disk, or a quota, is full: " if lacks_space else ""
            reason = f"{prefix}{type(failure).__name__}: {str(failure).rstrip('.')}."
        remedy = "Earlier checkpoints are untouched. Fix the cause, then resume from the newest."
        kind = NoSpaceError if lacks_space else CheckpointError
        raise kind(explain(f"Cannot write {target}.", reason, remedy)) from failure


def _is_ours(name: str) -> bool:
    return checkpoint_step(name) is not None
