"""Tensors in safetensors files, of which only the blocks that are asked for are read."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from hftrain.core.types import StoredTensor
from hftrain.storage.tensors import ALIASES, check_header, unreadable_tensors

_PACKED = "F4"  # two numbers in each byte


class StoredBlock(NamedTuple):
    """A block of a tensor, in a file.

    Args:
        path: The file.
        file: Its open reader.
        name: The block's name in the file.
        dtype: The file format's name of its dtype.
        sizes: The block's shape.
        offsets: The index of its first element in each dimension of the whole tensor.
    """

    path: Path
    file: Any
    name: str
    dtype: str
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    def read(self, starts: Sequence[int], stops: Sequence[int]) -> torch.Tensor:
        """Return a copy of the elements from `starts` to `stops`, indices of the whole tensor."""
        cut = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, self.offsets, strict=True))
        try:
            # the reader returns memory-mapped tensors, which change when the file is overwritten
            if not cut or self.dtype == _PACKED:  # which it does not slice
                found = self.file.get_tensor(self.name)[cut]
            else:
                found = self.file.get_slice(self.name)[cut]
            copy: torch.Tensor = found.clone(memory_format=torch.contiguous_format)
        except Exception as error:
            raise unreadable_tensors(self.path, error) from error
        return copy


class FileTensor(StoredTensor):
    """A tensor in one or more files, read on demand.

    Args:
        shape: The shape of the whole tensor.
        blocks: Its blocks, which cover it without overlap.
    """

    def __init__(self, shape: tuple[int, ...], blocks: Sequence[StoredBlock]) -> None:
        self.shape, self.blocks = torch.Size(shape), blocks

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return a block, see `StoredTensor`; only the stored blocks that intersect with it are read."""
        first = tuple(offsets or (0 for _ in self.shape))
        sizes = self.shape if sizes is None else torch.Size(sizes)
        last = [start + size for start, size in zip(first, sizes, strict=True)]
        found: torch.Tensor | None = None
        for block in self.blocks:
            starts = list(map(max, first, block.offsets))
            stops = [min(stop, o + size) for stop, o, size in zip(last, block.offsets, block.sizes, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            piece = block.read(starts, stops)
            if piece.shape == sizes:
                return piece
            found = piece.new_empty(sizes) if found is None else found
            found[tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, first, strict=True))] = piece
        if found is None:  # an empty block, whose dtype is that of the others
            at = self.blocks[0].offsets
            found = self.blocks[0].read(at, at).new_empty(sizes)
        return found


def open_tensors(path: Path) -> dict[str, FileTensor]:
    """Open a safetensors file; names that shared a tensor when saved share a `FileTensor`.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        check_header(path)
        file: Any = safe_open(path, framework="pt")
        found = {}
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            shape, dtype = part.get_shape(), part.get_dtype()
            if dtype == _PACKED:
                shape[-1] //= 2
            block = StoredBlock(path, file, name, dtype, tuple(shape), tuple(0 for _ in shape))
            found[name] = FileTensor(block.sizes, [block])
        aliases = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
        found.update({alias: found[name] for alias, name in aliases.items()})
    except Exception as error:
        raise unreadable_tensors(path, error) from error
    return found


def read_whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Read every `FileTensor` of a state whole, each once; other values are returned unchanged."""
    read = functools.cache(FileTensor.read)
    return {name: read(value) if isinstance(value, FileTensor) else value for name, value in state.items()}
