"""The documented names of a checkpoint's folder and files."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
