"""Keeping predictions: batch by batch, padded where lengths differ, in the data's order over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy
import torch

from hftrain.core.errors import TaskError, explain
from hftrain.core.tree import batch_size_of, map_tensors

PADDING = -100
_DTYPES = {str(dtype): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)}  # fmt: skip
# Types that cannot hold -100; padding makes them int64.
_UNSIGNED = {torch.bool, torch.uint8}


class Group(Protocol):
    """The collectives that gathering needs; every rank must call them."""

    world_size: int

    @property
    def device(self) -> torch.device:
        """Where tensors must be to travel."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's rows."""

    def gather_object(self, value: Any) -> list[Any]:
        """Return every rank's plain data."""

    def reduce(self, tensor: torch.Tensor, op: Literal["sum", "mean", "max"] = "sum") -> torch.Tensor:
        """Return the sum, mean or maximum over ranks."""


class Kept:
    """Keep one stream of nested tensors (predictions, labels, inputs or losses) over an evaluation.

    Args:
        moves_every: Batches kept on the device before they move to the host; None moves them at the end.
    """

    def __init__(self, *, moves_every: int | None = None) -> None:
        self._moves_every = moves_every
        self._batches: list[Any] = []
        self._num_on_host = 0
        self.batch_sizes: list[int] = []

    def add(self, tree: Any) -> None:
        """Keep one batch's tensors, arrays and numbers (0-d ones become rows); None is skipped.

        Raises:
            TaskError: The batch holds anything else.
        """
        if tree is None:
            return
        tree = map_tensors(as_tensors(tree), _as_rows)
        self._batches.append(tree)
        self.batch_sizes.append(batch_size_of(tree) or 0)
        if self._moves_every and len(self._batches) - self._num_on_host >= self._moves_every:
            self.to_host()

    def to_host(self) -> None:
        """Move what is still on the device to host memory; synchronises."""
        for index in range(self._num_on_host, len(self._batches)):
            self._batches[index] = map_tensors(self._batches[index], torch.Tensor.cpu)
        self._num_on_host = len(self._batches)

    def per_batch(self) -> list[Any] | None:
        """Return this rank's batches as NumPy arrays, one entry each; None if nothing was kept."""
        self.to_host()
        return [to_numpy(tree) for tree in self._batches] or None

    def joined(self, group: Group, *, is_interleaved: bool) -> Any:
        """Return everything as NumPy arrays, concatenated over batches and ranks; None if nothing was kept.

        Lengths that differ beyond the first dimension are padded on the right with -100. Collective.

        Args:
            group: The ranks.
            is_interleaved: Rank r of W held batches r, r + W, ...; else each rank held a contiguous run.
        """
        self.to_host()
        tree = concatenate(self._batches) if self._batches else None
        if group.world_size == 1:
            return to_numpy(tree)
        tree = _gather_tree(tree, group)
        if is_interleaved and tree is not None:
            order = interleaved_order(group.gather_object(self.batch_sizes))
            tree = map_tensors(tree, lambda tensor: tensor[order])
        return to_numpy(tree)


def as_tensors(tree: Any) -> Any:
    """Return nested values with arrays and numbers as tensors.

    Raises:
        TaskError: A value is neither; the error names its type.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    if isinstance(tree, Mapping):
        return {key: as_tensors(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, (list, tuple)):
        return tuple(as_tensors(value) for value in tree if value is not None)
    if isinstance(tree, (numpy.ndarray, numpy.generic, bool, int, float)):
        return torch.as_tensor(tree)
    raise TaskError(
        explain(
            "Predictions were to be kept.",
            f"They hold a {type(tree).__name__}, and only tensors, arrays and numbers can be kept.",
            "Leave it out with ignore_keys or preprocess_logits_for_metrics, or use torchmetrics in a TaskModule.",
        )
    )


def concatenate(trees: Sequence[Any]) -> Any:
    """Concatenate nested tensors along the first dimension, padding the others with -100 to the longest.

    What is no tensor has no place along it and becomes None.
    """
    first = trees[0]
    if isinstance(first, torch.Tensor):
        return _concatenate_tensors(trees)
    if isinstance(first, Mapping):
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (list, tuple)):
        return tuple(concatenate([tree[index] for tree in trees]) for index in range(len(first)))
    return None


def to_numpy(tree: Any) -> Any:
    """Turn nested host tensors into NumPy arrays; bfloat16, which NumPy lacks, becomes float32."""
    return map_tensors(tree, _tensor_to_numpy)


def put_back(tree: Any, order: Any) -> Any:
    """Put the rows of nested arrays where their samples stand in the dataset; arrays of other lengths stay.

    Args:
        tree: What `Kept.joined` gave.
        order: The places of the samples in the order they were read.
    """
    rows = numpy.argsort(order)
    if isinstance(tree, numpy.ndarray):
        return tree[rows] if len(tree) == len(rows) else tree
    if isinstance(tree, Mapping):
        return {key: put_back(value, order) for key, value in tree.items()}
    return tuple(put_back(value, order) for value in tree) if isinstance(tree, tuple) else tree


def interleaved_order(batch_sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the row order that restores the data's order after ranks took batches in turn.

    Args:
        batch_sizes: For each rank, the sizes of its batches in its own order.
    """
    starts, offset = [], 0
    for sizes in batch_sizes:
        starts.append([offset + sum(sizes[:index]) for index in range(len(sizes))])
        offset += sum(sizes)
    order: list[int] = []
    for turn in range(max((len(sizes) for sizes in batch_sizes), default=0)):
        for rank, sizes in enumerate(batch_sizes):
            if turn < len(sizes):
                order.extend(range(starts[rank][turn], starts[rank][turn] + sizes[turn]))
    return torch.tensor(order, dtype=torch.int64)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().unsqueeze(0) if tensor.dim() == 0 else tensor.detach()


def _concatenate_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_padded(tensor, shape) for tensor in tensors])


def _padded(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Pad every dimension but the first on its right."""
    if list(tensor.shape[1:]) == list(shape):
        return tensor
    if tensor.dtype in _UNSIGNED:
        tensor = tensor.to(torch.int64)
    padded = tensor.new_full((tensor.shape[0], *shape), PADDING)
    padded[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded


def _tensor_to_numpy(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _gather_tree(tree: Any, group: Group) -> Any:
    """Gather nested tensors whose structure a rank without batches cannot know: it learns it from the others."""
    leaves: list[torch.Tensor] = []
    map_tensors(tree, leaves.append)
    specs = group.gather_object([[str(leaf.dtype), list(leaf.shape[1:])] for leaf in leaves])
    known = next((spec for spec in specs if spec), None)
    if known is None:
        return None
    structures = group.gather_object(_structure(tree))
    gathered = []
    for index, (_, shape) in enumerate(known):
        widest = [max(sizes) for sizes in zip(*(spec[index][1] for spec in specs if spec), strict=True)]
        dtype = functools.reduce(torch.promote_types, (_DTYPES[spec[index][0]] for spec in specs if spec))
        if dtype in _UNSIGNED and any(spec[index][1] != widest for spec in specs if spec):
            # A rank that pads changes its type; the others follow.
            dtype = torch.int64
        leaf = leaves[index] if leaves else torch.empty((0, *shape))
        gathered.append(group.gather(_padded(leaf, widest).to(group.device, dtype)).cpu())
    structure = next(structure for structure, spec in zip(structures, specs, strict=True) if spec)
    return _fill(structure, iter(gathered).__next__)


def _structure(tree: Any) -> Any:
    """Describe a nested structure as JSON data: a tensor is 0, a tuple a list, a mapping its items in order."""
    if isinstance(tree, Mapping):
        return {"items": [[key, _structure(value)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return [_structure(value) for value in tree]
    return 0 if isinstance(tree, torch.Tensor) else None


def _fill(structure: Any, next_leaf: Callable[[], torch.Tensor]) -> Any:
    if isinstance(structure, dict):
        return {key: _fill(value, next_leaf) for key, value in structure["items"]}
    if isinstance(structure, list):
        return tuple(_fill(value, next_leaf) for value in structure)
    return None if structure is None else next_leaf()
