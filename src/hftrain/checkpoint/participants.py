"""The content of a checkpoint as lists of named participants: a save and a resume use the same list in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrain.checkpoint.state_files import Keep
from hftrain.storage.tensors import save_containers


@dataclass(frozen=True, slots=True)
class Participant:
    """A part of the state that each process saves for itself.

    Args:
        name: Its key in the process's file.
        state_dict: Returns the state; None if there is none, which is left out.
        load_state_dict: Restores it.
        default: Passed to `load_state_dict` if the checkpoint has none.
    """

    name: str
    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]
    default: Any = None


@dataclass(frozen=True, slots=True)
class InFile:
    """A part of the state that the main process writes into a separate file.

    Args:
        name: The file's name.
        state_dict: Returns the state; None if there is none. All processes call it.
        load: Restores it from a checkpoint's folder.
        write: Writes the state into a file.
    """

    name: str
    state_dict: Callable[[], Any]
    load: Callable[[Path], None]
    write: Callable[[Any, Path], None] = save_containers


@dataclass(frozen=True, slots=True)
class InManifest:
    """A part of the state that the manifest records, in plain values.

    Args:
        state_dict: Returns facts by name; names are unique to the participant.
        load_state_dict: Restores from all facts of a manifest; None if the planning of the run reads them.
    """

    state_dict: Callable[[], Mapping[str, Any]]
    load_state_dict: Callable[[Mapping[str, Any]], None] | None = None


def gather(participants: Iterable[Participant]) -> dict[str, Any]:
    """Return the states by name, without those that are None."""
    states = {each.name: each.state_dict() for each in participants}
    return {name: state for name, state in states.items() if state is not None}


def restore(participants: Iterable[Participant], states: Mapping[str, Any]) -> None:
    """Restore each participant from its state."""
    for each in participants:
        each.load_state_dict(states.get(each.name, each.default))


def writers(participants: Iterable[InFile], keep: Keep) -> list[Callable[[Path], None]]:
    """Return functions that write the participants' current state as files into a checkpoint's folder.

    Args:
        participants: In order.
        keep: Copies tensors to host memory, if they are written later.
    """
    states = [(each, each.state_dict()) for each in participants]
    return [_writer(each, keep(state)) for each, state in states if state is not None]


def _writer(participant: InFile, state: Any) -> Callable[[Path], None]:
    return lambda folder: participant.write(state, folder / participant.name)
