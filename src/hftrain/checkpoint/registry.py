"""What a checkpoint holds: one registry of named entries, which a save and a resume walk in the same order."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.layout import OPTIMIZER, SCALER
from hftrain.checkpoint.state_files import Keep, Writer, restore_optimizer, restore_scaler, whole_state
from hftrain.core.seed import capture_rng
from hftrain.precision.base import Precision
from hftrain.storage.tensors import save_containers
from hftrain.strategies.base import Strategy


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
