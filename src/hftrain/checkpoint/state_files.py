"""What a checkpoint holds besides weights: a registry of named entries, and a reader and a writer for each file.

Each process writes its part of a state that is split, and any number of processes can read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.fitting import check_optimizer, check_state, group_settings, keep_choices, misfit, restoring
from hftrain.checkpoint.manifest import (
    MANIFEST,
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    SCALER,
    TRAINER_STATE,
    WEIGHT_SHARDS,
    read_manifest,
    rng_name,
)
from hftrain.core.devices import to_host
from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger
from hftrain.core.seed import capture_rng
from hftrain.core.state import PER_RANK, HistoryText, TrainerState, WindowState, find_misfit
from hftrain.optim.schedules import refresh_rate
from hftrain.precision.base import Precision
from hftrain.storage.files import read_json, unreadable, write_text
from hftrain.storage.shards import open_shards, read_whole, save_shards
from hftrain.storage.tensors import load_containers, save_containers
from hftrain.strategies.base import Strategy, has_engine

# Writes a file into a checkpoint's folder.
Writer = Callable[[Path], None]
# Copies the tensors of a nested structure to host memory, if they are written later.
Keep = Callable[[Any], Any]

# An entry of the log history has about ten values, so this allows ten million entries.
_HISTORY_SCALE = 10
# The fields of a logging window that each process has for itself.
_PER_RANK = [field.name for field in fields(WindowState) if field.metadata == PER_RANK]

logger = get_logger(__name__)


def load_part(folder: Path, name: str, *, with_numpy: bool = False) -> dict[str, Any]:
    """Read a file with a dictionary onto the CPU; raises `CheckpointError` if it is missing or damaged."""
    check_complete(folder, name)
    path = folder / name
    content = load_containers(path, with_numpy=with_numpy)
    if not isinstance(content, dict):
        raise unreadable(path, f"It holds a {type(content).__name__} instead of a dictionary")
    return content


def load_optimizer(folder: Path, *, in_parts: bool = False) -> dict[str, Any]:
    """Read the optimizer's state dict, whole or sharded; raises `CheckpointError` if it is missing or damaged.

    With `in_parts`, tensors that were saved in shards are `StoredTensor` values, of which nothing is read yet.
    """
    state = load_part(folder, OPTIMIZER)
    with restoring(folder / OPTIMIZER):
        shards = open_shards(folder, stem=OPTIMIZER_SHARDS)
        for name, tensor in (shards if in_parts else read_whole(shards)).items():
            index, _, key = name.partition(".")
            state["state"].setdefault(int(index), {})[key] = tensor
    return state


def load_process_state(folder: Path, *, rank: int, world_size: int) -> dict[str, Any]:
    """Read what one process saved for itself, as `capture_own` wrote it; raises `CheckpointError` if it is damaged."""
    return load_part(folder, rng_name(rank=rank, world_size=world_size), with_numpy=True)


def save_trainer_state(state: TrainerState, folder: Path, history: HistoryText | None = None) -> None:
    """Write the documented, human-readable state; raises `CheckpointError` if a callback's state is not plain data.

    Args:
        history: The text of the log history to write; None writes that of the state.
    """
    try:
        parts = state.json_parts(history)
    except (TypeError, ValueError) as error:
        names = [name for name, value in state.stateful_callbacks.items() if not _is_json(value)]
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


# -- states that are split among processes ----------------------------------------------------------------------------


def as_it_is(tree: Any) -> Any:
    """Return the structure itself, uncopied, because it is written at once."""
    return tree


def capture_shards(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer | None, keep: Keep = as_it_is
) -> list[Writer]:
    """Return functions that write this process's shards of model and optimizer; none if they are saved whole.

    Args:
        model: As the strategy wrapped it.
        optimizer: None to leave its state out.
    """
    position = {"rank": strategy.rank, "world_size": strategy.world_size}
    weights = strategy.model_shards(model)
    writers: list[Writer] = []
    if weights is not None:
        blocks = keep(weights)
        writers.append(lambda folder: save_shards(blocks, folder, stem=WEIGHT_SHARDS, **position))
    split = None if optimizer is None else strategy.optimizer_shards(model, optimizer)
    if split is not None:
        optimizer_blocks = keep(split[1])
        writers.append(lambda folder: save_shards(optimizer_blocks, folder, stem=OPTIMIZER_SHARDS, **position))
    return writers


def capture_own(state: dict[str, Any], strategy: Strategy, keep: Keep = as_it_is) -> Writer:
    """Return a function that writes this process's own state, its random numbers included."""
    own = keep(state)
    name = rng_name(rank=strategy.rank, world_size=strategy.world_size)
    # Copied when it is written: what `keep` returns may still be on its way.
    return lambda folder: save_containers(own if strategy.device.type == "cpu" else to_host(own)(), folder / name)


def load_own(folder: Path, strategy: Strategy, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Read the per-process state, which another number of processes may have saved.

    Args:
        saved: The checkpoint's ``geometry``: ``world_size``, and ``readers``, if any, as from `readers_of`.
    """
    data, rank = strategy.data, strategy.rank
    readers = saved.get("readers") or list(range(saved["world_size"]))
    if len(readers) != strategy.world_size:
        logger.warning(
            "%s was saved by %d processes and resumes on %d: random numbers (dropout) will differ.",
            *(folder, len(readers), strategy.world_size),
        )
    if saved["world_size"] == data.world_size:
        is_same = len(readers) == strategy.world_size and readers[rank] == data.rank
        return load_process_state(folder, rank=rank if is_same else readers.index(data.rank), world_size=len(readers))
    states = [load_process_state(folder, rank=each, world_size=len(readers)) for each in range(len(readers))]
    return share_out(states, rank=data.rank)


def readers_of(strategy: Strategy) -> list[int] | None:
    """Return the data rank of each process; None if all read different samples. Collective."""
    return None if strategy.data is strategy else strategy.gather_object(strategy.data.rank)


def whole_state(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the part of an optimizer's state that the main process writes; see `capture_shards`. Collective."""
    split = strategy.optimizer_shards(model, optimizer)
    return split[0] if split else strategy.optimizer_state(model, optimizer)


def restore_optimizer(
    folder: Path,
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
) -> None:
    """Load an optimizer's state after calling `check` on it. Collective; mutates the optimizer.

    Raises:
        CheckpointError: The state is missing, damaged, or does not fit.
    """
    settings, state = group_settings(optimizer), load_optimizer(folder, in_parts=strategy.loads_parts)
    if "deepspeed" in state and not has_engine(strategy, "deepspeed"):
        raise misfit(folder / OPTIMIZER, "DeepSpeed partitioned it, and the run does not use DeepSpeed")
    check(state)
    with restoring(folder / OPTIMIZER):
        strategy.load_optimizer_state(model, optimizer, keep_choices(state, settings))
    check_optimizer(folder / OPTIMIZER, optimizer, before=settings)


def restore_scaler(folder: Path, precision: Precision) -> None:
    """Load the loss scale, if the precision has one; mutates it."""
    if precision.state_dict():
        state = load_part(folder, SCALER)
        check_state(folder / SCALER, state, precision, own=precision.state_dict())
        with restoring(folder / SCALER):
            precision.load_state_dict(state)


def restore_schedule(path: Path, schedule: Any, state: dict[str, Any]) -> None:
    """Load a schedule's state, of which the form is known, from a file; mutates it and its optimizer's rates."""
    check_state(path, state, schedule, own=schedule.state_dict())
    schedule.load_state_dict(state)
    refresh_rate(schedule)


def share_out(states: Sequence[dict[str, Any]], *, rank: int) -> dict[str, Any]:
    """Return the state of one new process, from the states that the old processes saved, by rank.

    Random numbers are those of the process with the same rank, or of the last. The open logging window is merged, so
    that the next log has the same means.
    """
    result = dict(states[min(rank, len(states) - 1)])
    # The position in the process's own share of the data, which is a different share now.
    result.pop("data", None)
    losses = [state["loss_window"] for state in states if "loss_window" in state]
    if losses:
        result["loss_window"] = losses[0] | {name: _mean([window[name] for window in losses]) for name in _PER_RANK}
    logs = [state["log_window"] for state in states if "log_window" in state]
    if logs:
        total = {part: _sum([window.get(part, {}) for window in logs]) for part in ("sums", "counts")}
        result["log_window"] = total if rank == 0 else {}
    return result


def _mean(values: Sequence[Any]) -> Any:
    if values[0] is None:
        return None
    if isinstance(values[0], list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(torch.as_tensor(value) for value in values) / len(values)


def _sum(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(part.get(name, 0) for part in parts) for name in {key: None for part in parts for key in part}}


class Scope(Enum):
    """Where a checkpoint holds an entry. A resume restores the scopes in this order."""

    MANIFEST = "in the manifest, as plain values"
    WHOLE = "in a file of the entry's name, which the main process writes"
    RANK = "in each process's own file"


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of the state.

    Args:
        state_dict: Returns the state, None if there is none to save; all processes call it. For the manifest it returns
            values by names that no other entry has.
        load: Restores what `state_dict` returned; None restores nothing. Of the manifest it gets all values, and for a
            file of its own the checkpoint's folder.
        default: Given to `load` if the processes' files have no such entry.
    """

    scope: Scope
    state_dict: Callable[[], Any]
    load: Callable[[Any], None] | None = None
    default: Any = None
    write: Callable[[Any, Path], None] = save_containers


class Registry:
    """The entries of a run's checkpoints by name.

    Args:
        entries: In the order in which they are saved and restored.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def _in_scope(self, scope: Scope) -> dict[str, Entry]:
        return {name: entry for name, entry in self._entries.items() if entry.scope is scope}

    def facts(self) -> dict[str, Any]:
        """Return the values for the manifest."""
        entries = self._in_scope(Scope.MANIFEST).values()
        return {name: fact for entry in entries for name, fact in entry.state_dict().items()}

    def own_state(self) -> dict[str, Any]:
        """Return what each process saves for itself: its random numbers, and the entries that have a state."""
        states = {name: entry.state_dict() for name, entry in self._in_scope(Scope.RANK).items()}
        return {**capture_rng(), **{name: state for name, state in states.items() if state is not None}}

    def capture(self, keep: Keep, *, names: Container[str] | None = None) -> list[Writer]:
        """Return functions that write the entries with a file, as they are now, into a checkpoint's folder. Collective.

        Args:
            keep: Copies tensors to host memory, if they are written later.
            names: Which entries; None for all.
        """
        entries = {name: entry for name, entry in self._in_scope(Scope.WHOLE).items() if names is None or name in names}
        states = {name: entry.state_dict() for name, entry in entries.items()}
        copies = {name: keep(state) for name, state in states.items() if state is not None}
        return [partial(_write, entries[name], name, state) for name, state in copies.items()]

    def load(self, scope: Scope, read: Callable[[str, Any], Any]) -> None:
        """Restore the entries of a scope.

        Args:
            read: Returns what an entry's `load` gets, from its name and its default.
        """
        for name, entry in self._in_scope(scope).items():
            if entry.load is not None:
                entry.load(read(name, entry.default))


def _write(entry: Entry, name: str, state: Any, folder: Path) -> None:
    entry.write(state, folder / name)


def training_entries(
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    *,
    read_precision: Callable[[Path], Any],
    check: Callable[[Path, dict[str, Any]], None] = lambda folder, state: None,
) -> dict[str, Entry]:
    """Return the entries of an optimizer and of a precision's loss scale, if it has one; a load mutates them.

    Args:
        read_precision: Returns the name of a checkpoint's precision, None if it is not known. In another precision, a
            run starts with its own loss scale.
        check: Called with a checkpoint's folder and the optimizer's state before that is loaded; raises if it does not
            fit.
    """

    def load_optimizer(folder: Path) -> None:
        restore_optimizer(folder, strategy, model, optimizer, check=partial(check, folder))

    def load_scale(folder: Path) -> None:
        if read_precision(folder) in (None, precision.policy.name):
            restore_scaler(folder, precision)

    return {
        OPTIMIZER: Entry(Scope.WHOLE, lambda: whole_state(strategy, model, optimizer), load_optimizer),
        SCALER: Entry(Scope.WHOLE, lambda: precision.state_dict() or None, load_scale),
    }
