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
    probe = folder / f"{WRITE_TEST}{secrets.token_hex(8)}" if strategy.is_local_main else None
    host = socket.gethostname()
    try:
        problem = _write(probe, host)
        notes = strategy.gather_object((host, str(folder), probe and probe.name, problem))
        probes = [(other, Path(path), name) for other, path, name, _ in notes if name is not None]
        problems = [note[3] for note in notes]
        if len(probes) > 1 and not any(problems):
            problems = strategy.gather_object(probe and _compare(probe, host, probes, on_each_node=on_each_node))
    finally:
        if probe is not None:
            with suppress(OSError):
                probe.unlink()
    for reason, remedy in filter(None, problems):
        raise ConfigError(f"Cannot save checkpoints to {folder}.", reason, remedy)


def _write(probe: Path | None, host: str) -> tuple[str, str] | None:
    """Write this machine's file; return the problem and what to do about it, None if there is none."""
    try:
        if probe is not None:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
    except OSError as error:
        return f"{host} cannot write there: {error}.", "Give a folder in which this user may create files."
    return None


def _compare(
    probe: Path, host: str, probes: list[tuple[str, Path, str]], *, on_each_node: bool
) -> tuple[str, str] | None:
    """Look for the other machines' files; return the problem and what to do about it, None if there is none."""
    for other, folder, name in probes if on_each_node else probes[:1]:
        is_other = name != probe.name
        if on_each_node and is_other and (probe.parent / name).exists():
            reason = f"{other} ({folder}) and {host} ({probe.parent}) write to the same storage."
            return reason, "On storage that machines share leave save_on_each_node out."
        if not on_each_node and is_other and not appears(probe.parent / name):
            reason = f"What {other} writes to {folder}, {host} does not find in {probe.parent}."
            return reason, "Give all machines one output_dir on storage that they share, or set save_on_each_node=True."
    return None
