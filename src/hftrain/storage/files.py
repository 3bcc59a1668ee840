"""Durable local files, folders that appear completely or not at all, and which folders are remote.

A folder is written next to its target as ``.staging-<token>-<name>``, flushed, and renamed once. A folder of that name
is first renamed to ``.replaced-<token>-<name>``, one to be deleted to ``.trash-<token>-<name>``. So after a kill at any
instant, these names tell `restore` and `sweep` what to do with each folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hftrain.core.errors import CheckpointError, ConfigError, MissingDependencyError
from hftrain.core.log import get_logger

CACHE_VARIABLE = "HFTRAIN_CACHE"

_CHUNK_BYTES = 1 << 20
WRITE_TEST = ".write-test-"
_MAX_LOOKS, _LOOK_S = 10, 0.3
_MAX_JSON_BYTES = 1 << 28
_MAX_JSON_VALUES = 10_000_000
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+)://(?P<path>.+)", re.IGNORECASE)
# fsspec chains such as simplecache::s3://..., and URLs mangled by pathlib.
_SPOILT = re.compile(r"[a-z][a-z0-9+.-]+(::.*|:/[^/].*)", re.IGNORECASE)
# The name comes last because an override of `_save` may read the step from its end. It used to come first.
_LEFTOVER = re.compile(
    r"\.(?P<kind>staging|replaced|trash)-(?:[0-9a-f]{8}-(?P<name>.+)|(?P<older_name>.+)-[0-9a-f]{8})"
)

logger = get_logger(__name__)


def check_writable(folder: Path) -> None:
    """Create a folder if it does not exist, and check that a file can be written in it."""
    probe = folder / f"{WRITE_TEST}{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(probe, "test")
        probe.unlink()
    except OSError as error:
        problem, remedy = f"Cannot write to {str(folder)!r}.", "Give a folder in which this user may create files."
        raise ConfigError(problem, f"{error}.", remedy) from error


def appears(path: Path) -> bool:
    """Tell whether a file exists, or appears within seconds: network file systems may show it late."""
    for _ in range(_MAX_LOOKS):
        if path.exists():
            return True
        time.sleep(_LOOK_S)
    return False


def write_text(path: Path, *parts: str) -> None:
    """Write a file so that it has the old or the new text if the machine crashes; durable on return."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    _fsync_folder(path.parent)


def read_json(path: Path, *, scale: int = 1) -> Any:
    """Read a JSON file of a bounded size.

    Args:
        scale: Factor on the limits of 256 MB and 10 million values.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > scale * _MAX_JSON_BYTES:
            raise ValueError(f"it is larger than {scale * _MAX_JSON_BYTES} bytes")
        text = path.read_bytes()
        if sum(map(text.count, (b",", b"[", b"{"))) > scale * _MAX_JSON_VALUES:  # each takes tens of bytes in memory
            raise ValueError(f"it holds more than {scale * _MAX_JSON_VALUES} values")
        return json.loads(text.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, f"It is absent or damaged: {error}") from error


def unreadable(path: Path | str, reason: str) -> CheckpointError:
    """Return the error for a checkpoint, or a file of one, that cannot be used."""
    remedy = "Use another checkpoint; without a path, resuming takes the newest complete one."
    return CheckpointError(f"Cannot read {path}.", f"{reason}.", remedy)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder and its subfolders except folders; links are yielded and not followed."""
    for parent, folders, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)
        yield from (path for name in folders if (path := Path(parent) / name).is_symlink())


def fsync_tree(folder: Path) -> None:
    """Flush each file and folder below `folder`, itself included, to disk; skips files that disappear meanwhile."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                _fsync_file(Path(parent) / name)
        _fsync_folder(Path(parent))


def begin(target: Path) -> Path:
    """Create and return the empty staging folder of `target`."""
    staged = _beside(target, "staging")
    staged.mkdir(parents=True)
    return staged


def find_staging(target: Path) -> Path:
    """Return the one staging folder of `target` that another process created."""
    candidates = [path for path, kind, name in _leftovers(target.parent) if kind == "staging" and name == target.name]
    if len(candidates) != 1:
        raise CheckpointError(
            f"Cannot write {target} from several processes.",
            f"This one sees {len(candidates)} staging folders that the main process made for it in {target.parent}.",
            "Put the output folder on storage that all machines share, and let one run at a time write to it.",
        )
    return candidates[0]


def staged_bytes(folder: Path) -> int:
    """Return the bytes in staging folders below a folder, 0 if there are none; safe while others write."""
    sizes = 0
    for staged in folder.glob(".staging-*"):
        for parent, _, names in os.walk(staged):
            for name in names:
                with contextlib.suppress(OSError):
                    sizes += os.path.getsize(os.path.join(parent, name))
    return sizes


def copy_user_files(target: Path, staged: Path, *, unless: tuple[str, ...]) -> Path:
    """Copy what user code has written into a folder that is to be replaced; return the staging folder.

    Args:
        unless: Names of files that show that the folder is an older one, of which nothing is kept.
    """
    if target.is_dir() and not target.is_symlink() and not any((target / name).exists() for name in unless):
        for path in target.iterdir():
            copy = staged / path.name
            if not copy.exists():
                shutil.copytree(path, copy) if path.is_dir() else shutil.copy2(path, copy)
    return staged


def commit(staged: Path, target: Path) -> None:
    """Flush a staging folder and rename it to `target`, replacing an existing one; durable on return."""
    fsync_tree(staged)
    backup = _beside(target, "replaced") if os.path.lexists(target) else None
    if backup is not None:
        os.rename(target, backup)
    os.rename(staged, target)
    _fsync_folder(target.parent)
    if backup is not None:
        discard(backup)


def discard(folder: Path) -> None:
    """Delete a folder, after renaming it; failures only warn."""
    try:
        if _LEFTOVER.fullmatch(folder.name) is None:
            folder = folder.rename(_beside(folder, "trash"))
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("Could not delete %s: %s", folder, error)


def restore(parent: Path, *, is_ours: Callable[[str], bool]) -> None:
    """Restore folders that a killed `commit` had renamed without replacing them.

    Args:
        is_ours: Tells from a target's name whether the caller may change it.
    """
    for path, kind, name in _leftovers(parent):
        if kind == "replaced" and is_ours(name) and not os.path.lexists(parent / name):
            logger.warning("Put back %s, which a killed save had set aside.", parent / name)
            path.rename(parent / name)


def sweep(parent: Path, *, is_ours: Callable[[str], bool]) -> None:
    """Delete leftovers of killed saves, after `restore`; takes the same arguments."""
    restore(parent, is_ours=is_ours)
    for path, _, name in _leftovers(parent):
        if is_ours(name):
            discard(path)
    for name in os.listdir(parent) if parent.is_dir() else ():
        if name.startswith((WRITE_TEST, f".{WRITE_TEST}")):
            (parent / name).unlink(missing_ok=True)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{kind}-{secrets.token_hex(4)}-{target.name}")


def _leftovers(parent: Path) -> list[tuple[Path, str, str]]:
    """List path, kind and target name of leftover folders; links are ignored."""
    if not parent.is_dir():
        return []
    with os.scandir(parent) as entries:  # a folder may contain thousands of checkpoints
        matches = [
            (entry.name, match)
            for entry in entries
            if (match := _LEFTOVER.fullmatch(entry.name)) is not None and entry.is_dir(follow_symlinks=False)
        ]
    matches.sort(key=lambda each: each[0])
    return [(parent / name, match["kind"], match["name"] or match["older_name"]) for name, match in matches]


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders
        return
    try:
        _fsync_file(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot flush folders
            raise


def existing_part(folder: Path) -> Path:
    """Return a folder if it exists, else its nearest existing parent."""
    return next(each for each in (folder, *folder.parents) if os.path.exists(each) or each == each.parent)


def free_bytes(folder: Path) -> int:
    """Return the free space for a folder, which need not exist yet; a user's quota may allow less."""
    return shutil.disk_usage(existing_part(folder.absolute())).free


def is_disk_full(error: BaseException | None) -> bool:
    """Tell whether an error, or its cause, says that a disk or a quota is full."""
    ids: set[int] = set()
    while error is not None and id(error) not in ids:
        ids.add(id(error))
        # safetensors reports the error number only in its message.
        if getattr(error, "errno", None) in _DISK_FULL or any(
            f"(os error {number})" in str(error) for number in _DISK_FULL
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def readable_bytes(number: float) -> str:
    """Return a number of bytes with a unit, in powers of 1000.

    Example:
        >>> readable_bytes(1_234_567_890)
        '1.23 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def is_url(folder: str | Path) -> bool:
    """Tell whether a folder is remote; a ``file://`` URL is a local path.

    Example:
        >>> is_url("s3://bucket/run"), is_url("runs/a"), is_url("file:///runs/a")
        (True, False, False)
    """
    match = _URL.fullmatch(str(folder))
    return match is not None and match["protocol"].lower() != "file"


def check_url(folder: str | Path) -> None:
    """Raise unless a folder is a path, or a URL whose store package is installed; does not use the network."""
    text = str(folder)
    problem = f"Cannot use the folder {text!r}."
    if _SPOILT.fullmatch(text):
        raise ConfigError(problem, "It is neither a path nor a plain URL.", "Give text such as 's3://bucket/run'.")
    if not is_url(text):
        return
    from fsspec.registry import get_filesystem_class, known_implementations

    protocol = text.partition("://")[0].lower()
    try:
        get_filesystem_class(protocol)
    except ValueError as error:
        raise ConfigError(problem, f"fsspec knows no store {protocol!r}.", "Use a protocol that it lists.") from error
    except ImportError as error:
        package = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
        # For some stores, only their own error message names the missing package.
        remedy = f"Run: pip install {package}." if package not in ("", "fsspec") else "Install what the message names."
        raise MissingDependencyError(problem, f"{str(error).rstrip('.')}.", remedy) from error


def mirror_of(url: str) -> Path:
    """Return the local folder for a remote one: always the same for a URL, with the same last name.

    It is in ``mirrors/`` of the folder in the environment variable `HFTRAIN_CACHE`, by default of ``hftrain`` in the
    user's cache (`XDG_CACHE_HOME`, ``~/.cache``). It may be deleted between two runs.
    """
    url = url.rstrip("/")
    setting = os.environ.get(CACHE_VARIABLE)
    cache = Path(setting) if setting else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hftrain"
    return cache.absolute() / "mirrors" / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]


def local_folder(folder: str | Path, *, start: Path) -> Path:
    """Return where a folder is written: the mirror of a remote one; a local one relative to `start`."""
    text = str(folder)
    return mirror_of(text) if is_url(text) else start / text.removeprefix("file://")
