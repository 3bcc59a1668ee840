"""Check before the first step that the machines of a run share its output folder as the settings say."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

from hftrain.core.errors import ConfigError
from hftrain.storage.files import WRITE_TEST, appears
from hftrain.strategies.base import Strategy


def check_shared_folder(folder: Path, strategy: Strategy, *, on_each_node: bool) -> None:
    """Raise if machines do not share an output folder that they should share, or the reverse. Collective.

    The first process of each machine writes a file there and looks for the files of the others.

    Raises:
        ConfigError: Raised on all processes; it names two machines and their folders.
    """
    own = folder / f"{WRITE_TEST}{secrets.token_hex(8)}" if strategy.is_local_main else None
    host = socket.gethostname()
    try:
        fault = _write(own, host)
        notes = strategy.gather_object((host, str(folder), own and own.name, fault))
        places = [(other, Path(at), name) for other, at, name, _ in notes if name is not None]
        faults = [note[3] for note in notes]
        if len(places) > 1 and not any(faults):
            faults = strategy.gather_object(own and _compare(own, host, places, on_each_node=on_each_node))
    finally:
        if own is not None:
            with suppress(OSError):
                own.unlink()
    for reason, remedy in filter(None, faults):
        raise ConfigError(f"Cannot save checkpoints to {folder}.", reason, remedy)


def _write(own: Path | None, host: str) -> tuple[str, str] | None:
    """Write this machine's file; return the problem and what to do about it, None if there is none."""
    try:
        if own is not None:
            own.parent.mkdir(parents=True, exist_ok=True)
            own.touch()
    except OSError as error:
        return f"{host} cannot write there: {error}.", "Give a folder in which this user may create files."
    return None


def _compare(
    own: Path, host: str, places: list[tuple[str, Path, str]], *, on_each_node: bool
) -> tuple[str, str] | None:
    """Look for the other machines' files; return the problem and what to do about it, None if there is none."""
    for other, folder, name in places if on_each_node else places[:1]:
        is_other = name != own.name
        if on_each_node and is_other and (own.parent / name).exists():
            reason = f"{other} ({folder}) and {host} ({own.parent}) write to the same storage."
            return reason, "On storage that machines share leave save_on_each_node out."
        if not on_each_node and is_other and not appears(own.parent / name):
            reason = f"What {other} writes to {folder}, {host} does not find in {own.parent}."
            return reason, "Give all machines one output_dir on storage that they share, or set save_on_each_node=True."
    return None
