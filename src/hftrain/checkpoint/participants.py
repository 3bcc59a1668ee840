"""What a checkpoint holds, as lists of named participants: a save and a resume walk the same list in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrain.checkpoint.states import Keep
from hftrain.storage.tensors import save_containers


@dataclass(frozen=True, slots=True)
class Participant:
    """A part of the state that each process saves of its own.

    Args:
        name: Under which the process's file holds it.
        state_dict: Returns the state; None where there is none, which is left out.
        load_state_dict: Goes on from it.
        default: What `load_state_dict` gets where a checkpoint holds none.
    """

    name: str
    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]
    default: Any = None


@dataclass(frozen=True, slots=True)
class InFile:
    """A part of the state that the main process writes into a file of its own.

    Args:
        name: The file's.
        state_dict: Returns the state; None where there is none. All processes call it.
        load: Goes on from a checkpoint's folder.
        write: Writes the state into a file.
    """

    name: str
    state_dict: Callable[[], Any]
    load: Callable[[Path], None]
    write: Callable[[Any, Path], None] = save_containers


@dataclass(frozen=True, slots=True)
class InManifest:
    """A part of the state that the manifest tells, in plain values.

    Args:
        state_dict: Returns facts by name; each participant has names of its own.
        load_state_dict: Goes on from all that a manifest tells; None where whoever plans the run reads them.
    """

    state_dict: Callable[[], Mapping[str, Any]]
    load_state_dict: Callable[[Mapping[str, Any]], None] | None = None


def gather(participants: Iterable[Participant]) -> dict[str, Any]:
    """Return the states that there are, by name."""
    states = {each.name: each.state_dict() for each in participants}
    return {name: state for name, state in states.items() if state is not None}


def restore(participants: Iterable[Participant], states: Mapping[str, Any]) -> None:
    """Let each participant go on from its state."""
    for each in participants:
        each.load_state_dict(states.get(each.name, each.default))


def writers(participants: Iterable[InFile], keep: Keep) -> list[Callable[[Path], None]]:
    """Return what writes the participants' files as they are now, into a checkpoint's folder.

    Args:
        participants: In order.
        keep: Copies tensors to host memory, where they are written later.
    """
    states = [(each, each.state_dict()) for each in participants]
    return [_writer(each, keep(state)) for each, state in states if state is not None]


def _writer(participant: InFile, state: Any) -> Callable[[Path], None]:
    return lambda folder: participant.write(state, folder / participant.name)
