"""Files that mean harm, for every kind of file that a checkpoint has."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.canary,)


def repack(path: Path, change: Callable[[bytes], bytes], *, compression: int = zipfile.ZIP_STORED) -> None:
    """Rewrite a file of torch with another structure."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def with_structure(path: Path, structure: bytes) -> None:
    """Write a file of torch whose structure is a pickle of one's own."""
    torch.save({}, path)
    repack(path, lambda _: structure)


def _zip_bomb(path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{path.stem}/data/1", bytes(1 << 26))


def _overlapping(path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 16)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
        for number in range(1, 2000):
            twin = zipfile.ZipInfo(entry.filename[:-1] + str(number))
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(twin, name, getattr(entry, name))
            archive.filelist.append(twin)
        archive._didModify = True


def _laughs(path: Path) -> None:
    tree: list[Any] = []
    for _ in range(60):
        tree = [tree, tree]
    torch.save({"state": tree, "param_groups": tree, "python": tree, "last_epoch": tree}, path)


def _endless(path: Path) -> None:
    tree: dict[str, Any] = {}
    tree.update(state=tree, param_groups=[tree], python=tree)
    torch.save(tree, path)


def _lying_size(path: Path) -> None:
    torch.save({"a": torch.ones(100)}, path)
    repack(path, lambda data: data.replace(b"Kd", b"J\x00\x00\x00\x40"))


def _reaching_beyond(path: Path) -> None:
    torch.save({"a": torch.ones(100)}, path)
    repack(path, lambda data: data.replace(b"Kd\x85", b"J\x00\x00\x00\x40\x85"))


def _one_beyond(path: Path, *, offset: int) -> None:
    """Let a tensor reach exactly one element beyond its memory, by its offset or by its size."""
    torch.save({"a": torch.ones(100)[offset:]}, path)
    num = 100 - offset
    repack(path, lambda data: data.replace(b"K%c\x85" % num, b"K%c\x85" % (num + 1)))


def _expanded(path: Path) -> None:
    torch.save({"state": {0: {"exp_avg": torch.ones(1).expand(1 << 40)}}, "a": torch.ones(1).expand(1 << 40)}, path)


def _frozen_methods(path: Path) -> None:
    state = collections.OrderedDict(a=torch.ones(1))
    state._metadata = {"items": 5}  # type: ignore[attr-defined]
    torch.save(state, path)
    repack(path, lambda data: data.replace(b"X\x09\x00\x00\x00_metadata", b"X\x04\x00\x00\x00keys"))


def _tar(path: Path, canary: str) -> None:
    with tarfile.open(path, "w") as archive:
        for name in ("pickle", "storages", "tensors", "sys_info"):
            data = pickle.dumps(Bomb(canary))
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to(path.parent / "manifest.json")


def _loop(path: Path) -> None:
    path.symlink_to(path)


CANARY = "canary"
# For every slot: by name, what writes the file.
ANYWHERE: dict[str, Callable[[Path], Any]] = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"hello"),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Bomb(CANARY))),
    "pickle protocol 0": lambda path: path.write_bytes(pickle.dumps(Bomb(CANARY), 0)),
    "folder": lambda path: path.mkdir(),
    "pipe": _pipe,
    "link": _link,
    "loop": _loop,
}
# For the slots of torch's format.
ZIPPED: dict[str, Callable[[Path], Any]] = {
    "bomb": lambda path: torch.save(Bomb(CANARY), path),
    "bomb inside": lambda path: torch.save({"state": [{"a": Bomb(CANARY)}]}, path),
    "bomb in the older format": lambda path: torch.save(
        {"a": Bomb(CANARY)}, path, _use_new_zipfile_serialization=False
    ),
    "bomb in the oldest format": lambda path: _tar(path, CANARY),
    "system": lambda path: with_structure(path, b"\x80\x02cposix\nsystem\nX\x05\x00\x00\x00false\x85R."),
    "builtins": lambda path: with_structure(path, b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R."),
    "module": lambda path: torch.save(torch.nn.Linear(1, 1), path),
    "script": lambda path: torch.jit.script(torch.nn.Linear(1, 1)).save(str(path)),
    "memory": lambda path: with_structure(path, b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R."),
    "memory by the older name": lambda path: with_structure(
        path, b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R."
    ),
    "compressed": _zip_bomb,
    "overlapping": _overlapping,
    "laughs": _laughs,
    "endless": _endless,
    "lying size": _lying_size,
    "reaching beyond": _reaching_beyond,
    "reaching one beyond": lambda path: _one_beyond(path, offset=0),
    "reaching one beyond from an offset": lambda path: _one_beyond(path, offset=3),
    "expanded": _expanded,
    "frozen methods": _frozen_methods,
    "nested": lambda path: with_structure(path, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
    "colliding keys": lambda path: with_structure(path, b"\x80\x02}(" + _colliding(20_000) + b"u."),
    "number": lambda path: torch.save(5, path),
    "list": lambda path: torch.save([1, 2], path),
    "tensor": lambda path: torch.save(torch.ones(3), path),
    "nothing": lambda path: torch.save({}, path),
    "other names": lambda path: torch.save({5: 1, None: 2, (1, 2): 3}, path),
    "other values": lambda path: torch.save(
        dict.fromkeys(("state", "param_groups", "last_epoch", "scale", "python", "numpy", "cpu"), "x"), path
    ),
    "set": lambda path: torch.save({"a": {1}}, path),
    "safetensors": lambda path: save_file({"a": torch.ones(1)}, path),
}
# For the slots of safetensors.
FLAT: dict[str, Callable[[Path], Any]] = {
    "endless header": lambda path: path.write_bytes(b"\xff" * 8 + b"{}"),
    "giant header": lambda path: _sparse(path, struct.pack("<Q", 99_000_000), 100_000_000),
    "large header": lambda path: _header(path, b"{" + b" " * (1 << 26) + b"}"),
    "no header": lambda path: path.write_bytes(struct.pack("<Q", 0)),
    "no text": lambda path: _header(path, b"\xff\xfe"),
    "list": lambda path: _header(path, b"[]"),
    "nested": lambda path: _header(path, b"[" * 100_000),
    "overlapping": lambda path: _tensors(path, a=("F32", [2], [0, 8]), b=("F32", [2], [4, 12])),
    "hole": lambda path: _tensors(path, a=("F32", [1], [0, 4]), b=("F32", [1], [8, 12])),
    "beyond": lambda path: _tensors(path, a=("F32", [1 << 40], [0, 1 << 42])),
    "overflow": lambda path: _tensors(path, a=("F32", [1 << 33, 1 << 33], [0, 12])),
    "negative": lambda path: _tensors(path, a=("F32", [-3], [0, 12])),
    "unknown dtype": lambda path: _tensors(path, a=("X99", [3], [0, 12])),
    "other names": lambda path: _tensors(path, a=("F32", [3], [0, 12])),
    "notes": lambda path: save_file({"a": torch.ones(1)}, path, {"hftrain.aliases": "[" * 50_000}),
    "aliases": lambda path: save_file({"a": torch.ones(1)}, path, {"hftrain.aliases": '{"b": ["a"], "c": 5}'}),
    "rows": lambda path: save_file({"a": torch.ones(1)}, path, {"hftrain.rows": '{"a": [0, 1000000000000]}'}),
}
# For the slots of JSON.
WRITTEN: dict[str, Callable[[Path], Any]] = {
    "null": lambda path: path.write_bytes(b"null"),
    "list": lambda path: path.write_bytes(b"[]"),
    "number": lambda path: path.write_bytes(b"5"),
    "nested": lambda path: path.write_bytes(b"[" * 1_000_000),
    "nested objects": lambda path: path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "long number": lambda path: path.write_bytes(b'{"global_step": ' + b"9" * 100_000 + b"}"),
    "giant": lambda path: _sparse(path, b"{", (1 << 28) + 1),
    "many": lambda path: path.write_bytes(b"[" + b"{}," * 6_000_000 + b"{}]"),
    "no text": lambda path: path.write_bytes(b'{"a": "\xff\xfe"}'),
    "more than one": lambda path: path.write_bytes(b"{}{}"),
    "other encoding": lambda path: path.write_bytes("{}".encode("utf-16")),
}


def json_kinds() -> Iterator[Any]:
    """Yield a value of each kind that JSON has, and the odd ones that Python reads besides."""
    yield from (None, True, -1, 0, 1.5, 10**30, "x", "\0", [], [1], {}, {"a": 1}, float("nan"), float("inf"))


def paths_of(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of everything in a nested structure, as keys from the outside in; of long lists both ends."""
    if at:
        yield at
    items = list(tree.items()) if isinstance(tree, dict) else []
    items = list(enumerate(tree)) if isinstance(tree, (list, tuple)) else items
    for key, value in items if len(items) < 30 else [items[0], items[-1]]:
        yield from paths_of(value, (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a nested structure with another value in one place."""
    if not at:
        return value
    key, *rest = at
    if isinstance(tree, dict):
        return {**tree, key: changed(tree[key], tuple(rest), value)}
    return type(tree)(changed(each, tuple(rest), value) if place == key else each for place, each in enumerate(tree))


def _header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def _tensors(path: Path, **entries: tuple[str, list[int], list[int]]) -> None:
    header = {
        name: dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True)) for name, entry in entries.items()
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))


def _sparse(path: Path, start: bytes, length: int) -> None:
    """Write a file that is as long as a giant one and takes no room."""
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(length)


def _colliding(num: int) -> bytes:
    """Return instructions for numbers that have one and the same hash in CPython, each with None as its value."""
    modulus = (1 << 61) - 1
    numbers = ((1 + modulus * (number + 1)).to_bytes(12, "little") for number in range(num))
    return b"".join(b"\x8a\x0c" + each + b"N" for each in numbers)
