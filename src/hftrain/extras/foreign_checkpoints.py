"""Checkpoints without a manifest: those of transformers' Trainer, and those that an override of a Trainer writes.

Position, logs and best metric are in `trainer_state.json`; the rest is read as from one of our own checkpoints. The
files of such a folder cannot be verified. Some settings of the run are not in it (or in a pickle, which is never read):
they are taken from the resuming run, with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.fitting import BatchGrid
from hftrain.checkpoint.manifest import (
    ARGUMENTS,
    MANIFEST,
    OPTIMIZER,
    SCHEDULER,
    TRAINER_STATE,
    UNCOMMITTED,
    Manifest,
    rng_name,
)
from hftrain.checkpoint.state_files import load_part, load_process_state, load_trainer_state
from hftrain.core.errors import CheckpointError
from hftrain.core.state import TrainerState

# The limit of counters.
_MAX_COUNT = 1 << 53


def check_foreign(folder: Path) -> None:
    """Raise if a checkpoint of transformers' Trainer lacks what a resume needs, or its state is inconsistent."""
    _read_state(folder)
    if _was_committed(folder):
        raise _unusable(folder, f"hftrain has written it, with a {MANIFEST} that is gone: nothing proves it whole")
    missing = [name for name in (OPTIMIZER, SCHEDULER) if not (folder / name).is_file()]
    names = {path.name for path in folder.iterdir()}
    if missing and any(name.startswith(("global_step", "pytorch_model_fsdp", "optimizer_")) for name in names):
        raise _unusable(folder, "Its optimizer is in the files of DeepSpeed or FSDP, which run code when they are read")
    if not missing and num_processes(folder) == 0:
        missing = [rng_name(rank=0, world_size=1)]
    if missing:
        raise _unusable(folder, f"It has no {' and no '.join(missing)}")


def num_processes(folder: Path) -> int:
    """Count the processes that saved a checkpoint by their files of random numbers."""
    if (folder / rng_name(rank=0, world_size=1)).is_file():
        return 1
    ranks = 0
    while (folder / rng_name(rank=ranks, world_size=2)).is_file():
        ranks += 1
    return ranks


def read_foreign(folder: Path, current: Mapping[str, Any], grid: BatchGrid) -> Manifest:
    """Return the manifest that a checkpoint of transformers' Trainer would have.

    Steps, epochs as a fraction, batch size and length of the run are in its state; its files show the processes.

    Args:
        current: The ``geometry`` of the resuming run, from which the rest is taken.
        grid: How that run cuts an epoch into batches.

    Raises:
        CheckpointError: Steps and epochs do not match: the data or the accumulation differs.
    """
    state = _read_state(folder)
    world_size, batch_size = num_processes(folder), state.train_batch_size or current["batch_size"]
    # As many processes are taken to have shared the data as they do now.
    readers = current.get("readers") if world_size == len(current.get("readers") or ()) else None
    world_size = current["world_size"] if readers else world_size
    geometry = {**current, "world_size": world_size, "readers": readers, "batch_size": batch_size}
    num_batches = grid.num_batches
    if (world_size, batch_size) != (current["world_size"], current["batch_size"]) and grid.round_size:
        is_split = grid.round_size < current["world_size"] * current["batch_size"]
        geometry["round_size"] = batch_size * (1 if is_split else world_size)
        if num_batches is not None and grid.num_samples is not None:
            has_rest = grid.num_samples % geometry["round_size"] and not current["drop_last"]
            num_batches = grid.num_samples // geometry["round_size"] + bool(has_rest)
    epoch, micro_steps = _position(folder, state, num_batches=num_batches, accumulation=grid.accumulation)
    num_samples = epoch * (grid.num_samples or 0) + micro_steps * (geometry.get("round_size") or 0)
    progress = {"step": state.global_step, "epoch": epoch, "micro_steps_in_epoch": micro_steps, "samples": num_samples}
    plan = {"max_steps": state.max_steps, "asked": state.max_steps, "num_batches": num_batches}
    return Manifest(step=state.global_step, facts={"progress": progress, "geometry": geometry, "plan": plan})


def check_foreign_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Raise for Adam's state in AdamW, or the reverse, which torch converts; the checkpoint does not name its class.

    The rest is checked as in our own checkpoints, see `check_optimizer`.
    """
    name = "decoupled_weight_decay"
    for group, own_group in zip(state.get("param_groups", []), optimizer.param_groups, strict=False):
        if name in group and group[name] != own_group.get(name):
            raise _unusable(folder / OPTIMIZER, f"It is not the state of a {type(optimizer).__name__}")


def _position(folder: Path, state: TrainerState, *, num_batches: int | None, accumulation: int) -> tuple[int, int]:
    """Return the completed epochs, and the micro-steps in the current one, from fractional epochs."""
    passes = state.epoch or 0.0
    epoch = math.floor(passes)
    if num_batches is None:
        # Without a length, transformers counts the whole run as one epoch.
        return epoch, round((passes - epoch) * state.max_steps * accumulation)
    micro_steps = round((passes - epoch) * num_batches)
    steps = epoch * -(-num_batches // accumulation) + -(-micro_steps // accumulation)
    if abs((passes - epoch) * num_batches - micro_steps) > 1e-4 or steps != state.global_step:
        raise _unusable(
            folder,
            f"It was at step {state.global_step} after {passes:g} passes, which {num_batches} batches a pass and "
            f"gradient_accumulation_steps={accumulation} do not give",
            "Resume with the data and the accumulation of that run. A checkpoint saved here can then change the latter",
        )
    return (epoch + 1, 0) if micro_steps == num_batches else (epoch, micro_steps)


def _was_committed(folder: Path) -> bool:
    """Tell whether arguments and state are those of a commit, which always writes a manifest."""
    try:
        # transformers pickles an object.
        is_ours = bool(load_part(folder, ARGUMENTS))
        state = load_process_state(folder, rank=0, world_size=num_processes(folder)) if is_ours else {}
    except CheckpointError:
        return False
    return "epoch_rng" in state and UNCOMMITTED not in state


def _read_state(folder: Path) -> TrainerState:
    """Return the state if its numbers can be true: nothing else proves these files."""
    state = load_trainer_state(folder)
    counts = (state.global_step, state.max_steps)
    numbers = (state.epoch or 0.0,)
    is_sound = all(type(count) is int and 0 <= count < _MAX_COUNT for count in counts)
    is_sound = is_sound and all(type(n) in (int, float) and 0 <= n < _MAX_COUNT for n in numbers)
    size = state.train_batch_size
    if not is_sound or not (size is None or (type(size) is int and 0 < size < _MAX_COUNT)):
        raise _unusable(folder / TRAINER_STATE, "Its counters are not numbers of steps, passes and samples")
    return state


def _unusable(path: Path, reason: str, remedy: str = "Load its weights into the model and start a new run") -> Any:
    return CheckpointError(f"Cannot resume from {path}.", f"{reason}.", f"{remedy}.")
