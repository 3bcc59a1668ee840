"""Select the files for the Hub, and take a snapshot of them that does not change during the upload."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from hftrain.checkpoint.manifest import JOURNAL, MANIFEST, TRAINER_STATE, checkpoint_step
from hftrain.storage.files import begin, discard, walk_files
from hftrain.storage.locks import FolderLock

LAST_CHECKPOINT = "last-checkpoint"
CARD = "README.md"

# Files that only a resume needs, in the layouts of all strategies, and SageMaker's marker files.
_RESUME_ONLY = re.compile(
    r"(optimizer|scheduler|scaler)([._].*)?|rng_state.*|global_step[0-9]+|latest|zero_to_fp32\.py"
    r"|pytorch_model_fsdp(_[0-9]+)?|.*\.sagemaker-upload(ing|ed)"
)
_SNAPSHOT = "hub"
ABANDONED_S = 24 * 3600.0


def output_files(output_dir: Path) -> dict[str, Path]:
    """Map names in the repository to an output folder's files: no checkpoint, journal, optimizer or hidden file."""
    return {
        name: path
        for name, path in folder_files(output_dir).items()
        if not any(_is_left_out(part) for part in Path(name).parts)
    }


def model_files(checkpoint: Path) -> dict[str, Path]:
    """Map names in the repository to the files of a checkpoint, except those that only a resume needs."""
    files = output_files(checkpoint)
    return {name: path for name, path in files.items() if name not in (MANIFEST, TRAINER_STATE)}


def folder_files(folder: Path, *, under: str = "") -> dict[str, Path]:
    """Map names in the repository, in the folder `under`, to all files of a folder."""
    files = {path.relative_to(folder).as_posix(): path for path in walk_files(folder) if path.is_file()}
    return {f"{under}/{name}" if under else name: files[name] for name in sorted(files)}


def take_snapshot(files: Mapping[str, Path], output_dir: Path) -> FolderLock:
    """Create and lock a hidden folder in `output_dir` with copies of some of its files.

    Files of committed checkpoints never change, so they are linked: links take no space and survive the deletion of the
    checkpoint. Other files are copied, and so are all files if the file system does not support links.
    """
    folder = begin(output_dir / _SNAPSHOT)
    snapshot = FolderLock(folder)
    try:
        snapshot.take()
        for name, source in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            is_committed = any(checkpoint_step(part) is not None for part in source.relative_to(output_dir).parts[:-1])
            (_link_or_copy if is_committed else shutil.copy2)(source, target)
    except BaseException:
        drop(snapshot)
        raise
    return snapshot


def drop(snapshot: FolderLock) -> None:
    """Delete and unlock a snapshot."""
    discard(snapshot.folder)
    snapshot.release()


def drop_abandoned(output_dir: Path) -> None:
    """Delete the snapshots of pushes that were killed at least a day ago.

    The lock identifies them. On file systems without locks, the age protects snapshots in use.
    """
    for path in output_dir.glob(f".staging-*-{_SNAPSHOT}"):
        snapshot = FolderLock(path)
        if path.stat().st_mtime < time.time() - ABANDONED_S and snapshot.take():
            drop(snapshot)


def _is_left_out(part: str) -> bool:
    is_checkpoint = checkpoint_step(part) is not None or part in (LAST_CHECKPOINT, JOURNAL)
    return is_checkpoint or part.startswith(".") or _RESUME_ONLY.fullmatch(part) is not None


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
