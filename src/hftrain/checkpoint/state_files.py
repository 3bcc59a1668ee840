"""The files of a checkpoint other than weights: a reader and a writer for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hftrain.checkpoint.fitting import restoring
from hftrain.checkpoint.layout import MANIFEST, OPTIMIZER, OPTIMIZER_SHARDS, TRAINER_STATE, rng_name
from hftrain.checkpoint.manifest import read_manifest
from hftrain.core.errors import CheckpointError
from hftrain.core.history import HistoryText
from hftrain.core.state import TrainerState, find_misfit
from hftrain.storage.files import read_json, unreadable, write_text
from hftrain.storage.shards import load_shards
from hftrain.storage.tensors import load_containers, save_containers

# An entry of the log history has about ten values, so this allows ten million entries.
_HISTORY_SCALE = 10


def load_part(folder: Path, name: str, *, with_numpy: bool = False) -> dict[str, Any]:
    """Read a file with a dictionary onto the CPU; raises `CheckpointError` if it is missing or damaged."""
    check_complete(folder, name)
    path = folder / name
    content = load_containers(path, with_numpy=with_numpy)
    if not isinstance(content, dict):
        raise unreadable(path, f"It holds a {type(content).__name__} instead of a dictionary")
    return content


def load_optimizer(folder: Path) -> dict[str, Any]:
    """Read the optimizer's state dict, whole or sharded; raises `CheckpointError` if it is missing or damaged."""
    state = load_part(folder, OPTIMIZER)
    with restoring(folder / OPTIMIZER):
        for name, tensor in load_shards(folder, stem=OPTIMIZER_SHARDS).items():
            index, _, key = name.partition(".")
            state["state"].setdefault(int(index), {})[key] = tensor
    return state


def save_rng(state: dict[str, Any], folder: Path, *, rank: int, world_size: int) -> None:
    """Write one process's random number generators, as `capture_rng` returns them."""
    save_containers(state, folder / rng_name(rank=rank, world_size=world_size))


def load_rng(folder: Path, *, rank: int, world_size: int) -> dict[str, Any]:
    """Read one process's random number generators; raises `CheckpointError` if they are missing or damaged."""
    return load_part(folder, rng_name(rank=rank, world_size=world_size), with_numpy=True)


def save_trainer_state(state: TrainerState, folder: Path, history: HistoryText | None = None) -> None:
    """Write the documented, human-readable state; raises `CheckpointError` if a callback's state is not plain data.

    Args:
        state: What to write.
        folder: Where.
        history: The text of the log history to write; None writes that of the state.
    """
    try:
        parts = state.json_parts(history)
    except (TypeError, ValueError) as error:
        names = [name for name, own in state.stateful_callbacks.items() if not _is_json(own)]
        raise CheckpointError(
            f"Cannot write {TRAINER_STATE}.",
            f"It cannot hold the state of {', '.join(names) or 'this run'}: {error}.",
            "Let a callback's state() return numbers, text, lists and dictionaries; tensors belong into the model.",
        ) from error
    write_text(folder / TRAINER_STATE, *parts)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def load_trainer_state(folder: Path) -> TrainerState:
    """Read the documented, human-readable state; raises `CheckpointError` if it is missing or damaged."""
    path = folder / TRAINER_STATE
    content = read_json(path, scale=_HISTORY_SCALE)
    problem = find_misfit(content)
    if problem is not None:
        raise unreadable(path, f"It is damaged: {problem}")
    state = TrainerState.from_dict(content)
    if (folder / MANIFEST).exists() and state.global_step != read_manifest(folder).step:
        raise unreadable(path, f"It says step {state.global_step}, and the manifest another")
    return state


def check_complete(folder: Path, name: str) -> None:
    """Raise `CheckpointError` if a checkpoint lacks a file because only its model was saved."""
    if not (folder / name).exists() and (folder / MANIFEST).exists() and read_manifest(folder).only_model:
        raise CheckpointError(
            f"Cannot resume from {folder}.",
            f"It was saved with save_only_model=True, so it has no {name}.",
            "Name an older checkpoint that is complete, start a new run from its weights, or save without "
            "save_only_model.",
        )
