"""Check what a file in torch's zip format would build, before torch reads it and without building it.

torch's safe reader runs no code from a file. But a file can make it allocate any amount of memory, and make versions
before 2.10 read beyond the end of a tensor. So torch only gets files with plain containers, numbers, text, and tensors
whose data is in the file. Time and memory are in proportion to the file's size: there is no other limit on how much a
file holds, because a limit would also have to hold when a checkpoint is saved.
"""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

MAX_DEPTH = 100
# The instruction for a longer integer is refused by torch's safe reader.
MAX_INTEGER_BITS = 255 * 8 - 1
# Values that are shared count each time: a short file could stand for billions.
_MAX_SHARED = 10_000_000
_MAX_EXPANDED_BYTES = 1 << 28
# torch.save follows each container with an instruction that numbers it, so it takes at least this many bytes.
_CONTAINER_BYTES = 6
_MAX_SHORT_CONTAINERS = 500_000

_STORAGE_BYTES = {
    **dict.fromkeys(("Bool", "Byte", "Char", "QInt8", "QUInt8", "QUInt2x4", "QUInt4x2"), 1),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("ComplexFloat", "Double", "Long"), 8),
    "ComplexDouble": 16,
}
_KEYS = (type(None), int, float, str)
_NUMPY = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    num_bytes: int
    item_bytes: int


class _Opaque(NamedTuple):
    """A tensor, an array or similar, checked when it was built."""

    kind: str


class _Ordered(dict[Any, Any]):
    """An OrderedDict, which may have the versions of a model's modules as an attribute."""


def check_archive(path: Path, *, with_numpy: bool = False) -> None:
    """Raise ValueError unless a file is in torch's zip format and contains plain data of a bounded size.

    Args:
        with_numpy: Also accept NumPy arrays of numbers.
    """
    _check_directory(path)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        prefix = entries[0].filename.partition("/")[0] if entries else ""
        sizes = {entry.filename.removeprefix(f"{prefix}/"): entry.file_size for entry in entries}
        if len(sizes) != len(entries) or any(not entry.filename.startswith(f"{prefix}/") for entry in entries):
            raise ValueError("its records do not have names of their own")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise ValueError("its records are compressed or encrypted")
        if sum(sizes.values()) > path.stat().st_size:
            raise ValueError("its records overlap")
        if "data.pkl" not in sizes or "constants.pkl" in sizes:
            raise ValueError("it was not written by torch.save")
        structure = archive.read(f"{prefix}/data.pkl")
    built, num = _Reader(sizes, with_numpy=with_numpy).read(structure)
    if _count(built, {}, 0) > max(_MAX_SHARED, num):
        raise ValueError(f"it repeats values more than {_MAX_SHARED} times")


def _check_directory(path: Path) -> None:
    """Check the size of a zip file's directory before it is read."""
    with open(path, "rb") as file:
        length = file.seek(0, 2)
        file.seek(max(0, length - 42))
        end = file.read()
        if len(end) < 42 or end[20:24] != b"PK\5\6" or end[40:] != b"\0\0":
            raise ValueError("it is not in the zip format of torch.save")
        size = int(struct.unpack("<I", end[32:36])[0])
        if end[:4] == b"PK\6\7":  # more records or bytes than the classic format can express
            file.seek(struct.unpack("<Q", end[8:16])[0] + 40)
            size = int(struct.unpack("<Q", file.read(8))[0])
        if size > length:
            raise ValueError("its directory is longer than the file")


class _Reader:
    """Interpret a pickle with placeholders for the objects that it would build.

    Args:
        sizes: Bytes of each record in the file.
    """

    def __init__(self, sizes: dict[str, int], *, with_numpy: bool) -> None:
        self._sizes = sizes
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._expanded_bytes = 0
        self._callables: dict[str, Callable[..., Any]] = {
            "collections OrderedDict": lambda: _Ordered(),
            "collections Counter": lambda counts: _expect(counts, dict),
            "__builtin__ set": _members,
            "__builtin__ complex": lambda real, imaginary: _opaque("number", real, imaginary),
            "__builtin__ bytearray": lambda data=b"": _opaque("bytes", _expect(data, bytes)),
            "_codecs encode": _encoded,
            "torch device": lambda kind, index=0: _opaque("device", _expect(kind, str), index),
            "torch._utils _rebuild_tensor_v2": self._tensor,
            "torch._utils _rebuild_tensor_v3": self._tensor,
            "torch._utils _rebuild_qtensor": self._tensor,
            "torch._utils _rebuild_parameter": lambda tensor, *_: _expect(tensor, _Opaque),
            "torch._utils _rebuild_sparse_tensor": self._sparse,
            "torch Size": lambda size: tuple(_expect(size, (list, tuple))),
            "torch.serialization _get_layout": lambda name: _Global(f"torch {name}"),
        }
        if with_numpy:
            self._callables |= dict.fromkeys(_NUMPY, _empty_array)
            self._callables["numpy dtype"] = _array_dtype

    def read(self, structure: bytes) -> tuple[Any, int]:
        """Return the placeholder of the whole structure, and the number of instructions."""
        num_containers = 0
        for number, (opcode, argument, place) in enumerate(pickletools.genops(structure)):
            if opcode.name in _CONTAINERS:
                num_containers += 1
                if num_containers > _MAX_SHORT_CONTAINERS + (place or 0) // _CONTAINER_BYTES:
                    raise ValueError("it holds more containers than torch.save writes in as many bytes")
            if opcode.name == "STOP":
                return self._stack.pop(), number
            self._follow(opcode.name, argument)
        raise ValueError("its structure has no end")

    def _follow(self, name: str, argument: Any) -> None:
        """Do what an instruction would do, with placeholders."""
        stack = self._stack
        match name:
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINSTRING":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                stack.append(_CONSTANTS[name])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "GLOBAL":
                stack.append(_Global(argument))
            case "MARK":
                self._marks.append(stack)
                self._stack = []
            case "TUPLE":
                self._stack = self._marks.pop()
                self._stack.append(tuple(stack))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "APPEND":
                item = stack.pop()
                _expect(stack[-1], list).append(item)
            case "APPENDS":
                self._stack = self._marks.pop()
                _expect(self._stack[-1], list).extend(stack)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._put([key, value])
            case "SETITEMS":
                self._stack = self._marks.pop()
                self._put(stack)
            case "REDUCE":
                self._call()
            case "BUILD":
                self._build()
            case "BINPERSID":
                self._load_storage()
            case _ if name != "PROTO":
                raise ValueError(f"it holds more than plain data: the instruction {name}")

    def _put(self, items: list[Any]) -> None:
        target = _expect(self._stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_checked_key(key)] = value

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        name = _expect(function, _Global).name
        if name not in self._callables:
            raise ValueError(f"it holds more than plain data: {name.replace(' ', '.')}")
        self._stack.append(self._callables[name](*_expect(arguments, tuple)))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, _Ordered) and isinstance(state, dict) and state.keys() <= {"_metadata"}:
            target.update(state)
        elif target == _Opaque("dtype") and all(part is None or isinstance(part, (int, str)) for part in state):
            pass
        elif target == _Opaque("array"):
            _, shape, dtype, _, data = state
            if dtype != _Opaque("dtype") or not isinstance(data, bytes) or math.prod(_counts(shape)) > len(data):
                raise ValueError("an array is not of numbers that are in the file")
        else:
            raise ValueError("it holds more than plain data: an object with a state")

    def _load_storage(self) -> None:
        word, kind, key, _location, num = _expect(self._stack.pop(), tuple)
        module, _, name = _expect(kind, _Global).name.partition(" ")
        item_bytes = 1 if name == "UntypedStorage" else _STORAGE_BYTES[name.removesuffix("Storage")]
        if word != "storage" or module not in ("torch", "torch.storage") or not isinstance(num, int):
            raise ValueError("a tensor's memory is not described as torch does")
        if self._sizes[f"data/{_expect(key, str)}"] != num * item_bytes:
            raise ValueError("a tensor has another size than its record in the file")
        self._stack.append(_Storage(num * item_bytes, item_bytes))

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Opaque:
        storage = _expect(storage, _Storage)
        item_bytes = storage.item_bytes
        for part in rest:  # newer versions store the dtype next to untyped memory
            dtype = getattr(torch, part.name.partition(" ")[2], None) if isinstance(part, _Global) else None
            item_bytes = dtype.itemsize if isinstance(dtype, torch.dtype) else item_bytes
        shape, strides = _counts(size), _counts(stride)
        (offset,) = _counts((offset,))
        num = math.prod(shape)
        reach = offset + sum((count - 1) * step for count, step in zip(shape, strides, strict=True)) + 1 if num else 0
        if reach * item_bytes > storage.num_bytes:
            raise ValueError("a tensor reaches beyond its memory")
        self._expanded_bytes += max(0, num * item_bytes - storage.num_bytes)
        if self._expanded_bytes > _MAX_EXPANDED_BYTES:
            raise ValueError("a tensor repeats its memory many times over")
        return _Opaque("tensor")

    def _sparse(self, layout: Any, data: Any) -> _Opaque:
        _expect(layout, _Global)
        *parts, size = [part for part in _expect(data, tuple) if part is not None and not isinstance(part, bool)]
        for part in parts:
            _expect(part, _Opaque)
        _counts(size)
        return _Opaque("tensor")


def _expect(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it holds a {type(value).__name__.strip('_')} where torch.save would not write one")
    return value


def is_key(value: Any) -> bool:
    """Tell whether a value may be a key, or a member of a set: None, text, a short number, or a tuple of them.

    Long numbers may all have the same hash, and hashing nested tuples can overflow the stack.
    """
    parts = value if isinstance(value, tuple) else (value,)
    return all(
        isinstance(part, _KEYS) and (not isinstance(part, int) or -(1 << 63) <= part < 1 << 64) for part in parts
    )


def _checked_key(key: Any) -> Any:
    if not is_key(key):
        raise ValueError("a key is not text or a short number")
    return key


def _members(items: Any) -> tuple[Any, ...]:
    return tuple(map(_checked_key, _expect(items, list)))


def _opaque(kind: str, *values: Any) -> _Opaque:
    if not all(isinstance(value, (float, int, str, bytes)) for value in values):
        raise ValueError(f"a {kind} is not described as Python does")
    return _Opaque(kind)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(each) is int and 0 <= each < 1 << 63 for each in values):
        raise ValueError("a shape does not consist of non-negative integers")
    return values


def _empty_array(kind: Any, shape: Any, _dtype: Any) -> _Opaque:
    if kind != _Global("numpy ndarray") or math.prod(_counts(shape)):
        raise ValueError("an array is not described as NumPy does")
    return _Opaque("array")


def _array_dtype(name: Any, *_: Any) -> _Opaque:
    if not isinstance(name, str) or name.lstrip("<>|=")[:1] not in tuple("biufc"):
        raise ValueError("an array does not hold numbers")
    return _Opaque("dtype")


def _encoded(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes are not described as Python does")
    return str(_expect(text, str)).encode("latin1")


def _count(node: Any, known: dict[int, int | None], depth: int) -> int:
    """Count the values that a traversal would visit; shared values count each time."""
    if not isinstance(node, (list, tuple, dict)) or isinstance(node, (_Global, _Storage, _Opaque)):
        return 1
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise ValueError("it holds itself")
        return found
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    known[id(node)] = None
    parts = [*node.keys(), *node.values()] if isinstance(node, dict) else node
    total = known[id(node)] = 1 + sum(_count(part, known, depth + 1) for part in parts)
    return total


_CONTAINERS = frozenset(("EMPTY_DICT", "EMPTY_LIST", "REDUCE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
