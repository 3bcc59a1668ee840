"""The names of a checkpoint's files, and `manifest.json`, with the sizes and checksums that verify them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hftrain.core.errors import CheckpointError
from hftrain.core.extras import installed_versions
from hftrain.storage.files import read_json, sha256, unreadable, walk_files, write_text
from hftrain.storage.hashing import Mark, mark

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
BIN_WEIGHTS = "pytorch_model.bin"
BIN_WEIGHTS_INDEX = "pytorch_model.bin.index.json"
WEIGHT_SHARDS = "model_shard"
OPTIMIZER_SHARDS = "optimizer_shard"
OWN_SHARDS = "own_shard"
TASK_STATE = "task_state.safetensors"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
DECLARED_OBJECTS = "own_optimizers.pt"
OUTSIDE_WEIGHTS = "outside_weights.safetensors"
TRAINER_STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
MANIFEST = "manifest.json"
# In the state that an override of `_save_checkpoint` lets a process write.
UNCOMMITTED = "uncommitted"
# In the output folder itself.
JOURNAL = "journal.jsonl"

PREFIX_CHECKPOINT_DIR = "checkpoint"

_FOLDER = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(0|[1-9][0-9]*)")
_WEIGHTS = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")
_PARTS = {WEIGHTS, WEIGHTS_INDEX, BIN_WEIGHTS, BIN_WEIGHTS_INDEX, TASK_STATE}
_PARTS |= {OPTIMIZER, SCHEDULER, SCALER, DECLARED_OBJECTS, OUTSIDE_WEIGHTS, TRAINER_STATE, ARGUMENTS}
_SHARD = re.compile(rf"({WEIGHT_SHARDS}|{OPTIMIZER_SHARDS}|{OWN_SHARDS})-\d{{5}}-of-\d{{5}}\.safetensors")
_RNG = re.compile(r"rng_state(_[0-9]+)?\.pth")


def checkpoint_name(step: int) -> str:
    """Return the name of the folder that holds the checkpoint of a step."""
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoint_step(path: str | Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None if it is not such a name.

    Example:
        >>> checkpoint_step("out/checkpoint-500")
        500
    """
    match = _FOLDER.fullmatch(str(path)) or _FOLDER.fullmatch(Path(path).name)  # a plain name is matched at once
    return None if match is None else int(match[1])


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """List the folders with names of checkpoints; see `checkpoint_names`."""
    return [Path(output_dir) / name for name in checkpoint_names(output_dir)]


def checkpoint_names(output_dir: str | Path, *, with_links: bool = True) -> list[str]:
    """List the names of folders that have names of checkpoints, sorted by step."""
    if not os.path.isdir(output_dir):
        return []
    with os.scandir(output_dir) as entries:  # distinguishes folders from files without a stat call each
        folders = [
            (step, entry.name)
            for entry in entries
            if (step := checkpoint_step(entry.name)) is not None and entry.is_dir(follow_symlinks=with_links)
        ]
    return [name for _, name in sorted(folders)]


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Return the checkpoint with the highest step in a folder, None if there is none or the folder does not exist.

    `Trainer.train(resume_from_checkpoint=True)` takes the newest intact one, whatever its step.

    Source: the documented `get_last_checkpoint`.
    """
    checkpoints = list_checkpoints(folder)
    return str(checkpoints[-1]) if checkpoints else None


def contents(path: Path) -> str:
    """Describe what is at a path where a checkpoint was expected."""
    if not path.is_dir():
        if path.suffix in _WEIGHTS and path.is_file():
            return "it is a file of weights, without the optimizer's state and the position in the data"
        return "it is a file" if path.exists() else "it does not exist"
    names = sorted(entry.name for entry in path.iterdir())
    return f"it holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "it is empty"


def nearby(path: Path) -> str:
    """Describe which checkpoints are in a folder and next to it."""
    paths = [*list_checkpoints(path), *list_checkpoints(path.parent)]
    names = ", ".join(str(each) for each in paths if each != path)
    if path.name.lower() in ("true", "false", "none") and not path.exists():
        return f"Pass {path.name.capitalize()} without quotation marks."
    if path.is_file() and checkpoint_step(path.parent.name) is not None:
        return f"Pass its folder: {path.parent}."
    if path.suffix in _WEIGHTS and path.is_file():
        return "To start from these weights, load them into the model and call train() without a checkpoint."
    listing = f"Checkpoints found there: {names}." if names else "No checkpoint lies inside it or next to it."
    return f"{listing} Pass a checkpoint's folder, or True for the newest in output_dir."


def rng_name(*, rank: int, world_size: int) -> str:
    """Return the file name of the random number generators of one process."""
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def is_part(name: str) -> bool:
    """Tell whether a resume would read a file of this name."""
    return name in _PARTS or any(pattern.fullmatch(name) for pattern in (_RNG, _SHARD))


def is_foreign(folder: Path) -> bool:
    """Tell whether a folder looks like a checkpoint of transformers' Trainer, or of an override."""
    return not (folder / MANIFEST).exists() and (folder / TRAINER_STATE).is_file()


FORMAT_VERSION = 1
PACKAGES = ("hftrain", "torch", "safetensors", "numpy", "accelerate", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The description of a checkpoint.

    Args:
        step: The optimizer updates done.
        facts: Recorded by the run: ``progress`` (counters), ``plan``, ``only_model``, ``geometry`` (see
            `check_resumable`).
        versions: Versions of the libraries that wrote it.
        files: Size in bytes and SHA-256 of each file, by its path inside the folder.
    """

    step: int
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def only_model(self) -> bool:
        """Whether it lacks what a resume needs. Source: the documented `save_only_model`."""
        return bool(self.facts.get("only_model", False))

    @property
    def is_finite(self) -> bool:
        """Whether its weights, and the losses since the previous save, were finite; True if not recorded."""
        return bool(self.facts.get("is_finite", True))

    @property
    def is_planned(self) -> bool:
        """Whether the plan of the run had a save at this step, and not only a signal, the clock or the end of it."""
        return bool(self.facts.get("is_planned", True))


def write_manifest(
    folder: Path, facts: Mapping[str, Any], *, step: int, hashes: Mapping[Mark, str] | None = None
) -> Manifest:
    """Hash every file of a folder and write its manifest, durably; the last step before the commit.

    Args:
        hashes: The SHA-256 of files that need not be read again, see `noting`.
    """
    files = {
        path.relative_to(folder).as_posix(): _record(path, hashes or {})
        for path in walk_files(folder)
        if path != folder / MANIFEST
    }
    manifest = Manifest(step=step, facts=dict(facts), versions=installed_versions(*PACKAGES), files=files)
    body = json.loads(json.dumps(asdict(manifest), allow_nan=False))
    write_text(folder / MANIFEST, json.dumps({**body, "checksum": _checksum(body)}, indent=1, sort_keys=True) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint without checking its files.

    Raises:
        CheckpointError: It is missing, damaged, or of a format unknown to this version.
    """
    if (folder / MANIFEST).is_symlink():
        raise unreadable(folder / MANIFEST, "It is a link")
    body = read_json(folder / MANIFEST)
    try:
        is_true = isinstance(body, dict) and body.pop("checksum", None) == _checksum(body)
    except (ValueError, RecursionError) as error:
        raise unreadable(folder / MANIFEST, f"It is not a manifest: {error}") from error
    if not is_true:
        raise unreadable(folder / MANIFEST, "Its content does not match its own checksum")
    if body.get("format_version") != FORMAT_VERSION:
        raise unreadable(
            folder / MANIFEST, f"Its format is {body.get('format_version')!r}; this version reads {FORMAT_VERSION}"
        )
    if set(body) != set(Manifest.__dataclass_fields__) or not _is_well_typed(body):
        raise unreadable(folder / MANIFEST, "Its entries are not those of this format")
    contradiction = _impossible(body["step"], body["facts"])
    if contradiction:
        raise unreadable(folder / MANIFEST, f"Its position in the data is impossible: {contradiction}")
    return Manifest(**body)


def verify(folder: Path, *, hashes: bool = True) -> Manifest:
    """Verify a checkpoint: each file is present, has the recorded size and SHA-256, and is not a link.

    Files that the manifest does not list are allowed, unless a resume would read them.

    Args:
        hashes: Compare the SHA-256 of the files, which reads them.

    Raises:
        CheckpointError: It is damaged; the message names the file.
    """
    manifest = read_manifest(folder)
    if checkpoint_step(folder) not in (None, manifest.step):
        raise unreadable(folder / MANIFEST, f"It was saved at step {manifest.step}, as another folder")
    for name, record in manifest.files.items():
        _verify_file(folder, name, record, hashes=hashes)
    for path in folder.iterdir():
        if is_part(path.name) and path.name not in manifest.files:
            raise unreadable(path, "It was not there when the checkpoint was saved")
    return manifest


def refuse_uncommitted(folder: Path) -> None:
    """Raise `CheckpointError` because a folder has no manifest."""
    raise CheckpointError(f"It has no {MANIFEST}, which proves it whole. Name it to resume from it.")


def refuse_links(folder: Path) -> None:
    """Raise `CheckpointError` if a part of a checkpoint without a manifest is a link, or not a regular file."""
    for path in folder.iterdir():
        if is_part(path.name) and not stat.S_ISREG(path.lstat().st_mode):
            raise unreadable(path, "It is a link or no regular file")


def inner_path(folder: Path, name: str) -> Path:
    """Return the path of a file in a manifest; raises if it is outside the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name != "/".join(parts) or parts[0] == "/" or ".." in parts or "\\" in name or ":" in parts[0]:
        raise unreadable(folder / MANIFEST, f"It names {name!r}, which is not a path inside the folder")
    return folder.joinpath(*parts)


def _verify_file(folder: Path, name: str, record: Any, *, hashes: bool) -> None:
    path = inner_path(folder, name)
    try:
        status = path.lstat()
    except OSError as error:
        raise unreadable(path, f"It cannot be found: {error}") from error
    if stat.S_ISLNK(status.st_mode) or path.resolve() != inner_path(folder.resolve(), name):
        raise unreadable(path, "It is a link, or lies in one")
    if not stat.S_ISREG(status.st_mode):
        raise unreadable(path, "It is not a regular file")
    if status.st_size != record["size"]:
        raise unreadable(path, f"It has {status.st_size} bytes instead of {record['size']}")
    if hashes and sha256(path) != record["sha256"]:
        raise unreadable(path, "Its SHA-256 differs from the one in the manifest")


def _record(path: Path, hashes: Mapping[Mark, str]) -> dict[str, Any]:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"Cannot save {path}.", "It is a link or not a regular file.", "Write its content instead."
        )
    return {"size": status.st_size, "sha256": hashes.get(mark(status)) or sha256(path)}


def _is_well_typed(body: dict[str, Any]) -> bool:
    records = body["files"].values() if isinstance(body["files"], dict) else [None]
    return (
        _is_count(body["step"])
        and isinstance(body["facts"], dict)
        and all(is_typed(body["facts"][name]) for name, is_typed in _FACTS.items() if name in body["facts"])
        and isinstance(body["versions"], dict)
        and all(isinstance(each, str) for each in body["versions"].values())
        and all(isinstance(record, dict) and set(record) == {"size", "sha256"} for record in records)
    )


def _is_count(value: Any) -> bool:
    # Random number generators, for example, accept no larger ones.
    return type(value) is int and 0 <= value < 1 << 53


def _impossible(step: int, facts: Mapping[str, Any]) -> str | None:
    """Return why no run has got to a position, which a resume would try to read up to; None if one may have.

    Each pass has an update, and each micro-step a sample, unless the run could not count its samples.
    """
    progress = facts.get("progress", {})
    # The steps of an Engine are those that its user counts.
    if "plan" not in facts or "step" not in progress:
        return None
    limits = {"epoch": step + 1}
    limits |= dict.fromkeys(("micro_steps_in_epoch", "offset_in_epoch"), max(progress.get("samples", 0), step << 16))
    excesses = [f"{name} is {progress[name]}" for name in limits if progress.get(name, 0) > limits[name]]
    excesses += [f"its own step is {progress['step']}"] if progress["step"] != step else []
    return f"{' and '.join(excesses)} at step {step}" if excesses else None


def _is_geometry(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    readers, names = value.get("readers") or [], ("world_size", "batch_size", "accumulation")
    are_known = isinstance(readers, list) and (not readers or set(readers) == set(range(value.get("world_size", 0))))
    return are_known and all(_is_count(value[name]) and value[name] > 0 for name in names if name in value)


# Checks of the facts that are read again.
_FACTS: dict[str, Callable[[Any], bool]] = {
    "progress": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "geometry": _is_geometry,
    "only_model": lambda value: isinstance(value, bool),
    "is_finite": lambda value: isinstance(value, bool),
    "restored_in_a_row": _is_count,
    "nonfinite_losses": _is_count,
    "run_id": lambda value: isinstance(value, str),
    "commit_number": _is_count,
    "saved_at_s": lambda value: type(value) in (int, float),
    "num_groups": _is_count,
    "requires_grad": lambda value: isinstance(value, dict) and all(isinstance(each, bool) for each in value.values()),
    "earlier_metrics": lambda value: isinstance(value, dict),
    "added_groups": lambda value: isinstance(value, list) and all(isinstance(each, list) for each in value),
}


def _checksum(body: dict[str, Any]) -> str:
    # Not NaN, which is not valid JSON but which Python reads.
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
