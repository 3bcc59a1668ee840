"""Tensors on disk: safetensors for flat dictionaries, torch's zip format for nested containers."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save

from hftrain.core.devices import has_own_queue, to_host
from hftrain.core.errors import CheckpointError
from hftrain.core.tree import map_tensors, tensors_of
from hftrain.storage.files import unreadable
from hftrain.storage.hashing import create

ALIASES = "hftrain.aliases"
_MAX_HEADER_BYTES = 100_000_000  # of the format's library, which reads no larger ones
_MAX_DEPTH = 100
# The instruction for a longer integer is refused by torch's safe reader.
_MAX_INTEGER_BITS = 255 * 8 - 1
# Values and tensors that are shared count each time: a short file could stand for billions.
_MAX_SHARED = 10_000_000
_MAX_EXPANDED_BYTES = 1 << 28
_SMALL_BYTES = 1 << 20
_KEYS = (type(None), int, float, str)
_PLAIN = (type(None), bool, int, float, str, complex, bytes, torch.device, torch.dtype, torch.layout)
_LAYOUTS = frozenset(
    (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)
# NumPy numbers that a Python number can replace in any computation, bit for bit.
_NUMBERS = (numpy.bool_, numpy.float64, numpy.int64)

_COMMON = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


class _NotPlain(Exception):
    """A value cannot be written; `place` is where it is in the structure."""

    place = ""


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; a tensor with several names is stored once, with the names in the metadata.

    Tensors that share memory in any other way are each written in full.
    """
    unique: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in tensors.items():
        stored_name = names.setdefault(tensor_identity(tensor) or name, name)
        if stored_name == name:
            unique[name] = tensor.detach()
        else:
            aliases[name] = stored_name
    notes = {"format": "pt", **(metadata or {})}
    if aliases:
        notes[ALIASES] = json.dumps(aliases, sort_keys=True)
    unique = _with_small_in_host_memory(unique)
    ordered = sorted(unique.items(), key=lambda item: (-item[1].element_size(), item[0]))
    text = _header(ordered, notes)
    with create(path) as file:  # the format's library opens the file itself, so the bytes could not be hashed
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                contiguous = tensor.resolve_conj().resolve_neg().cpu().contiguous()
                # Not `reshape`: a single number may keep another stride.
                file.write(contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8).numpy().data)


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointError` if `save_tensors` would; writes nothing and reads no tensor data."""
    _header(tensors.items(), {})


def save_containers(tree: Any, path: Path) -> None:
    """Write tensors, numbers and text in nested dictionaries, lists, tuples and sets, as accepted by safe loading."""
    plain = _with_small_in_host_memory(plain_containers(tree))
    # Given a path, torch drops the cause of a failed write; a full disk must be distinguishable.
    with create(path) as file:
        torch.save(plain, file)


def plain_containers(tree: Any, where: str = "state") -> Any:
    """Return the form of a nested structure that `save_containers` writes; nothing is copied.

    Args:
        where: Its name in errors.
    """
    try:
        return _plain(tree)
    except _NotPlain as error:
        remedy = "Put only tensors, numbers, text, dictionaries, lists, tuples and sets into a state."
        raise CheckpointError(f"Cannot save {where}{error.place:.200}.", f"{error}.", remedy) from None


def load_containers(path: Path, *, with_numpy: bool = False) -> Any:
    """Read a file of `save_containers` onto the CPU, without running code from it.

    Args:
        with_numpy: Also accept NumPy arrays, which the RNG files of the Hugging Face Trainer contain.
    """
    try:
        _check_regular(path)
        _check_records(path)
        with _numpy_accepted() if with_numpy else contextlib.nullcontext(), warnings.catch_warnings():
            # torch warns of sparse tensors; a filter that makes errors of warnings would make the file unreadable.
            warnings.simplefilter("ignore", UserWarning)
            tree = torch.load(path, map_location="cpu", weights_only=True)
        _check_size(tree, path.stat().st_size)
    except Exception as error:
        raise unreadable_tensors(path, error) from error
    return tree


def check_header(path: Path) -> None:
    """Raise ValueError if a safetensors file is not a regular file, or its header is implausibly large."""
    _check_regular(path)
    with open(path, "rb") as file:
        if int.from_bytes(file.read(8), "little") > _MAX_HEADER_BYTES:
            raise ValueError(f"its header takes more than {_MAX_HEADER_BYTES} bytes")


def tensor_identity(tensor: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal for two tensors that are the same view of the same memory.

    Returns None if not comparable: other objects, subclasses, empty tensors, tensors without memory.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.device.type in ("meta", "xla") or tensor.numel() == 0:  # XLA does not expose its memory addresses
        return None
    storage = tensor.untyped_storage().data_ptr()
    return (tensor.device, storage, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all tensors in a nested structure, each counted once; split tensors count in full."""
    sizes: dict[Any, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor_identity(tensor) or id(tensor)] = tensor.numel() * tensor.element_size()
        return tensor

    guard = map_tensors(tree, note)  # keeps all tensors alive, so that no identity is reused while counting
    del guard
    return sum(sizes.values())


def memory_of(tree: Any) -> set[Any]:
    """Return what identifies the memory of the tensors in a nested structure; a view has that of its base."""
    found: set[Any] = set()
    map_tensors(tree, lambda tensor: found.add((tensor_identity(tensor) or (None,))[:2]))
    return found - {(None,)}


def _with_small_in_host_memory(tree: Any) -> Any:
    """Replace small tensors on a device by copies, for which the host waits once; it waits for each of the others.

    Memory of which the tree holds several views stays as it is, because torch's format stores it once.
    """
    views: dict[Any, dict[Any, torch.Tensor]] = defaultdict(dict)
    for tensor in tensors_of(tree):
        is_queued = tensor.device.type != "cpu" and has_own_queue(tensor.device.type)
        if is_queued and (identity := tensor_identity(tensor)):
            views[identity[:2]][identity] = tensor
    unshared = [item for group in views.values() if len(group) == 1 for item in group.items()]
    small = {identity: tensor for identity, tensor in unshared if tensor.nbytes <= _SMALL_BYTES}
    if not small:
        return tree
    copies = to_host(small)()
    return map_tensors(tree, lambda tensor: copies.get(tensor_identity(tensor), tensor))


def _header(tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors:
        dtype, shape = _format_dtype(name, tensor), list(tensor.shape)
        if dtype == "F4":  # two numbers in each byte
            shape[-1] *= 2
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"Cannot save {len(header) - 1} tensors as safetensors.",
            f"Their names and shapes take {len(text)} bytes, and the format allows {_MAX_HEADER_BYTES}.",
            "Set save_safetensors=False.",
        )
    return text + b" " * (-len(text) % 8)


def _format_dtype(name: str, tensor: torch.Tensor) -> str:
    code = _known_dtype(tensor.dtype) if tensor.layout == torch.strided else None
    if code is None:
        raise CheckpointError(
            f"Cannot save {name} as safetensors.",
            f"The format has no {tensor.layout} tensors of {tensor.dtype}.",
            "Set save_safetensors=False.",
        )
    return code


@functools.cache
def _known_dtype(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype, from its library; None if it has none."""
    try:
        data = save({"a": torch.empty(0, dtype=dtype)})
    except KeyError:
        return None
    return str(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["a"]["dtype"])


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise ValueError("it is not a regular file")


def _check_records(path: Path) -> None:
    """Raise ValueError unless a file is in torch's zip format, and its records take no more bytes than the file."""
    if not zipfile.is_zipfile(path):
        raise ValueError("it is not in the zip format of torch.save")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise ValueError("its records are compressed or encrypted")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("its records overlap")


def _check_size(tree: Any, num_bytes: int) -> None:
    """Raise ValueError for a structure that would take far more memory or time than a file of so many bytes."""
    counts: dict[int, int | None] = {}
    expanded_bytes = 0

    def count(node: Any, depth: int) -> int:
        nonlocal expanded_bytes
        if isinstance(node, torch.Tensor) and node.layout == torch.strided:
            stored_bytes = node.untyped_storage().nbytes()
            expanded_bytes += max(0, node.nbytes - stored_bytes)
            if stored_bytes > num_bytes or expanded_bytes > _MAX_EXPANDED_BYTES:
                raise ValueError("a tensor is larger than its memory in the file")
        if not isinstance(node, (list, tuple, dict)):
            return 1
        if id(node) not in counts:
            if depth > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
            if isinstance(node, dict) and not all(map(_is_key, node)):
                raise ValueError("a key is not text or a short number")
            counts[id(node)] = None
            parts = [*node.keys(), *node.values()] if isinstance(node, dict) else node
            counts[id(node)] = 1 + sum(count(part, depth + 1) for part in parts)
        total = counts[id(node)]
        if total is None:
            raise ValueError("it holds itself")
        return total

    if count(tree, 0) > max(_MAX_SHARED, num_bytes):
        raise ValueError(f"it repeats values more than {_MAX_SHARED} times")


def _plain(tree: Any, depth: int = 0) -> Any:
    kind = type(tree)
    if kind in _PLAIN:
        if tree == b"":
            raise _NotPlain("It is an empty bytes object, which torch's safe loader refuses")
        if kind is int and tree.bit_length() > _MAX_INTEGER_BITS:
            raise _NotPlain(f"It is an integer of more than {_MAX_INTEGER_BITS} bits")
        return tree
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _plain_tensor(tree.detach())  # drops Python attributes, which would be pickled, too
    if kind in _NUMBERS:
        return tree.item()
    if kind is bytearray:
        return bytearray(tree)
    if depth > _MAX_DEPTH:
        raise _NotPlain(f"It holds itself, or is nested more than {_MAX_DEPTH} deep")
    if kind is set:
        return set(map(_key, tree))
    key: Any = None
    try:
        if kind in (dict, OrderedDict, Counter):
            items = {}
            for key, value in tree.items():
                items[_key(key)] = _plain(value, depth + 1)
            return items if kind is dict else kind(items)
        if kind in (list, tuple, torch.Size):
            parts: list[Any] = []
            for value in tree:
                key = len(parts)
                parts.append(_plain(value, depth + 1))
            return parts if kind is list else kind(parts)
    except _NotPlain as error:
        error.place = f"[{key!r:.80}]{error.place}"
        raise
    raise _NotPlain(f"It is a {kind.__module__}.{kind.__qualname__}, which could not be loaded without running code")


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if (
        tensor.is_nested
        or tensor.is_meta
        or tensor.layout not in _LAYOUTS
        or not (tensor.is_quantized or _is_stored(tensor.dtype))
    ):
        kind = "nested" if tensor.is_nested else f"{tensor.layout} {tensor.dtype}"
        raise _NotPlain(f"It is a {kind} tensor on {tensor.device}, which torch's format, or its safe loader, lacks")
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        # One that repeats its memory would take more when it is read than there is in the file.
        return tensor.contiguous() if tensor.nbytes > tensor.untyped_storage().nbytes() else tensor
    return tensor


@functools.cache
def _is_stored(dtype: torch.dtype) -> bool:
    if dtype in _COMMON:  # saves the import of torch's writer before the first step
        return True
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except KeyError:
        return False
    return True


def _key(key: Any) -> Any:
    plain = _plain(key)
    if not _is_key(plain):
        raise _NotPlain("It is a key, which must be None, a number, text or a tuple of them")
    return plain


def _is_key(value: Any) -> bool:
    # Long numbers may all have the same hash, and hashing nested tuples can overflow the stack.
    parts = value if isinstance(value, tuple) else (value,)
    return all(
        isinstance(part, _KEYS) and (not isinstance(part, int) or -(1 << 63) <= part < 1 << 64) for part in parts
    )


def _numpy_accepted() -> contextlib.AbstractContextManager[Any]:
    rebuild: Any = numpy.empty(0).__reduce__()[0]
    return torch.serialization.safe_globals([rebuild, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))])


def unreadable_tensors(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that could not be read."""
    # torch's own words advise to load what can run code.
    refused = re.search(r"GLOBAL \S+|Unsupported \w+ \d+", str(error))
    told = refused[0] if refused else str(error) or type(error).__name__
    reason = "It does not exist" if not path.exists() else f"It is damaged or holds more than plain data: {told}"
    return unreadable(path, reason)
