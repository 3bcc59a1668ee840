"""Safetensors files that are read in parts, and one per process with its blocks of tensors that are split."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from hftrain.core.errors import CheckpointError
from hftrain.core.types import Shard, StoredTensor
from hftrain.storage.files import unreadable
from hftrain.storage.tensors import ALIASES, check_header, save_tensors, unreadable_tensors

_PACKED = "F4"  # two numbers in each byte
# Its entries are [start, length] for rows of the first dimension, and [offsets, shape] for other blocks.
_PLACES = "hftrain.rows"


class StoredBlock(NamedTuple):
    """A block of a tensor, in a file.

    Args:
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
        slices = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, self.offsets, strict=True))
        try:
            # the reader returns memory-mapped tensors, which change when the file is overwritten
            if not slices or self.dtype == _PACKED:  # which it does not slice
                block = self.file.get_tensor(self.name)[slices]
            else:
                block = self.file.get_slice(self.name)[slices]
            copy: torch.Tensor = block.clone(memory_format=torch.contiguous_format)
        except Exception as error:
            raise unreadable_tensors(self.path, error) from error
        return copy


class FileTensor(StoredTensor):
    """A tensor in one or more files, read on demand.

    Args:
        blocks: Its blocks, which cover it without overlap.
    """

    def __init__(self, shape: tuple[int, ...], blocks: Sequence[StoredBlock]) -> None:
        self.shape, self.blocks = torch.Size(shape), blocks

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return a block, see `StoredTensor`; only the stored blocks that intersect with it are read."""
        begin = tuple(offsets or (0 for _ in self.shape))
        sizes = self.shape if sizes is None else torch.Size(sizes)
        end = [start + size for start, size in zip(begin, sizes, strict=True)]
        result: torch.Tensor | None = None
        for block in self.blocks:
            starts = list(map(max, begin, block.offsets))
            stops = [min(stop, o + size) for stop, o, size in zip(end, block.offsets, block.sizes, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            piece = block.read(starts, stops)
            if piece.shape == sizes:
                return piece
            result = piece.new_empty(sizes) if result is None else result
            result[tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, begin, strict=True))] = piece
        if result is None:  # an empty block, whose dtype is that of the others
            origin = self.blocks[0].offsets
            result = self.blocks[0].read(origin, origin).new_empty(sizes)
        return result


def open_tensors(path: Path) -> dict[str, FileTensor]:
    """Open a safetensors file; names that shared a tensor when saved share a `FileTensor`.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        check_header(path)
        file: Any = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            shape, dtype = part.get_shape(), part.get_dtype()
            if dtype == _PACKED:
                shape[-1] //= 2
            block = StoredBlock(path, file, name, dtype, tuple(shape), tuple(0 for _ in shape))
            tensors[name] = FileTensor(block.sizes, [block])
        aliases = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
        tensors.update({alias: tensors[name] for alias, name in aliases.items()})
    except Exception as error:
        raise unreadable_tensors(path, error) from error
    return tensors


def read_whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Read every `FileTensor` of a state whole, each once; other values are returned unchanged."""
    read = functools.cache(FileTensor.read)
    return {name: read(value) if isinstance(value, FileTensor) else value for name, value in state.items()}


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; names that shared a tensor when saved share one again."""
    return read_whole(open_tensors(path))


# -- one file per process ----------------------------------------------------------------------------------------------


def save_shards(shards: Mapping[str, Shard], folder: Path, *, stem: str, rank: int, world_size: int) -> None:
    """Write one process's shards; writes no file if there are none.

    Args:
        shards: The shards by name. The file's metadata records which blocks they are, of which shapes.
    """
    if shards:
        places = {name: _place(shard) for name, shard in shards.items() if shard.offsets is not None}
        path = folder / f"{stem}-{rank:05d}-of-{world_size:05d}.safetensors"
        tensors = {name: shard.block for name, shard in shards.items()}
        save_tensors(tensors, path, metadata={_PLACES: json.dumps(places, sort_keys=True)})


def _place(shard: Shard) -> list[Any]:
    offsets, shape = list(shard.offsets or ()), list(shard.shape)
    is_rows = shape and not any(offsets[1:]) and list(shard.block.shape[1:]) == shape[1:]
    return [offsets[0], shape[0]] if is_rows else [offsets, shape]


def find_shards(folder: Path, *, stem: str) -> list[Path]:
    """List the files that `save_shards` wrote, ordered by rank."""
    pattern = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}\.safetensors")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name)) if folder.is_dir() else []


def load_shards(folder: Path, *, stem: str) -> dict[str, torch.Tensor]:
    """Merge the shards of all processes, on the CPU; independent of the current number of processes."""
    return read_whole(open_shards(folder, stem=stem))


def open_shards(folder: Path, *, stem: str) -> dict[str, FileTensor]:
    """Find the blocks of every tensor in the files of all processes; see `load_shards`. Reads no tensor.

    Raises:
        CheckpointError: A file is damaged, or a block is missing or duplicated.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, list[StoredBlock]] = {}
    for path in find_shards(folder, stem=stem):
        places = _places_in(path)
        for name, tensor in open_tensors(path).items():
            block, shape = tensor.blocks[0], tuple(tensor.shape)
            if name in places:
                start, size = places[name]
                is_rows = isinstance(start, int)
                offsets = (start, *block.offsets[1:]) if is_rows else tuple(start)
                block, shape = block._replace(offsets=offsets), (size, *shape[1:]) if is_rows else tuple(size)
            whole = shapes.setdefault(name, shape)
            parts = blocks.setdefault(name, [])
            if whole != shape or not len(shape) == len(block.offsets) == len(block.sizes):
                raise unreadable(path, f"It is damaged: {name} is a part of {list(shape)}, elsewhere of {list(whole)}")
            parts.append(block)
    return {name: FileTensor(shapes[name], _covering(name, shapes[name], parts)) for name, parts in blocks.items()}


def _covering(name: str, shape: tuple[int, ...], blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
    """Return the blocks that are not empty, or one; raise if they do not cover the tensor, each element once.

    The processes of a mesh cut each dimension independently of the others, so that the blocks are a grid.
    """
    blocks = [block for block in blocks if 0 not in block.sizes] or list(blocks[:1])
    spans = [[(o, o + size) for o, size in zip(each.offsets, each.sizes, strict=True)] for each in blocks]
    cuts = [sorted({0, size, *(bound for span in spans for bound in span[dim])}) for dim, size in enumerate(shape)]
    # How often the files hold each cell of the grid that all blocks cut.
    counts = torch.zeros([len(cut) - 1 for cut in cuts], dtype=torch.int64)
    problem = f"{_text(spans[0])} has another dtype than the others" if len({x.dtype for x in blocks}) > 1 else ""
    for span in spans:
        counts[tuple(slice(cut.index(a), cut.index(b)) for cut, (a, b) in zip(cuts, span, strict=True))] += 1
    for cell in (counts != 1).nonzero()[:1].tolist():
        span_text = _text([(cut[index], cut[index + 1]) for cut, index in zip(cuts, cell, strict=True)])
        problem = f"{span_text} is {'there more than once' if counts[tuple(cell)] else 'missing'}"
    for span in spans:
        if any(stop > size for (_, stop), size in zip(span, shape, strict=True)):
            problem = f"{_text(span)} is outside of it"
    if problem:
        raise CheckpointError(
            f"Cannot read {name}, whose shape is {list(shape)}, from {blocks[0].path.parent}.",
            f"Its block {problem}.",
            "Copy the files of all processes, or use another checkpoint.",
        )
    return blocks


def _text(span: Sequence[tuple[int, int]]) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in span)}]"


def _places_in(path: Path) -> dict[str, Any]:
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            places = json.loads((file.metadata() or {})[_PLACES])
        for name, (start, shape) in places.items():
            numbers = [start, shape] if isinstance(start, int) else [*start, *shape]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"the place of {name} is {[start, shape]}")
        return dict(places)
    except Exception as error:
        raise unreadable(path, f"It is damaged: {error!r}") from error
