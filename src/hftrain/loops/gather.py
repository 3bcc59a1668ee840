"""Keeping predictions: batch by batch, padded where lengths differ, in the data's order over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy
import torch

from hftrain.core.errors import TaskError
from hftrain.core.tree import map_tensors
from hftrain.loops.buffers import Array, Rows, allocate, common_kind, padded
from hftrain.loops.objects import Objects, decode, encode, to_plain

# How much a rank sends at once.
_CHUNK_BYTES = 1 << 24


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


class _Keeper:
    """Take one stream of nested tensors (predictions, labels, inputs or losses), and move it to the host in time."""

    def __init__(self, *, moves_every: int | None = None, takes_objects: bool = False) -> None:
        self._moves_every = moves_every
        self._takes_objects = takes_objects
        self._waiting: list[Any] = []

    def add(self, tree: Any) -> None:
        """Keep one batch's tensors, arrays and numbers (0-d ones become rows); None is skipped.

        Raises:
            TaskError: The batch holds anything else, or cannot be joined with those before.
        """
        if tree is None:
            return
        tree = map_tensors(as_tensors(tree, takes_objects=self._takes_objects), _as_rows)
        self._waiting.append(tree)
        if len(self._waiting) == self._moves_every or _is_on_host(tree):
            self.to_host()

    def to_host(self) -> None:
        """Move what is still on the device to host memory; synchronises."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            self._store(map_tensors(waiting.pop(), torch.Tensor.cpu))

    def _store(self, tree: Any) -> None:
        raise NotImplementedError


class KeptBatches(_Keeper):
    """Keep a stream batch by batch.

    Args:
        moves_every: Batches kept on the device before they move to the host; None moves them at the end.
        takes_objects: Keep what is no tensor, too.
    """

    def __init__(self, *, moves_every: int | None = None, takes_objects: bool = False) -> None:
        super().__init__(moves_every=moves_every, takes_objects=takes_objects)
        self._batches: list[Any] = []

    def _store(self, tree: Any) -> None:
        self._batches.append(to_numpy(tree))

    def joined(self, group: Group, *, is_interleaved: bool) -> list[Any] | None:
        """Return all ranks' batches as NumPy arrays, one entry each; None if nothing was kept. Collective.

        Args:
            group: The ranks.
            is_interleaved: Rank r of W held batches r, r + W, ...; else each rank held a contiguous run.
        """
        self.to_host()
        if group.world_size == 1:
            return self._batches or None
        counts = group.gather_object(len(self._batches))
        found: list[list[Any]] = [[] for _ in counts]
        for turn in range(max(counts)):
            mine = encode(self._batches[turn]) if turn < len(self._batches) else None
            for rank, batch in enumerate(group.gather_object(mine)):
                if turn < counts[rank]:
                    found[rank].append(decode(batch))
        if is_interleaved:
            return [batches[turn] for turn in range(max(counts)) for batches in found if turn < len(batches)] or None
        return [batch for batches in found for batch in batches] or None


class Kept(_Keeper):
    """Keep a stream as a whole: nothing is held twice where the number of samples is known.

    Args:
        moves_every: Batches kept on the device before they move to the host; None moves them at the end.
        takes_objects: Keep what is no tensor, too: lists as one object per sample, others as one per batch.
        num_samples: How many samples this rank will see, as far as is known.
        folder: Hold arrays in files there, mapped into memory; None holds them in memory.
    """

    def __init__(
        self,
        *,
        moves_every: int | None = None,
        takes_objects: bool = False,
        num_samples: int | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(moves_every=moves_every, takes_objects=takes_objects)
        self._options: dict[str, Any] = {"num_expected": num_samples or 0, "folder": folder}
        self._folder = folder
        self._tree: Any = None
        self._structure: Any = None

    def _store(self, tree: Any) -> None:
        structure = _structure(tree)
        if self._tree is None:
            self._tree, self._structure = _map_leaves(tree, self._open), structure
        elif structure != self._structure:
            raise _mismatch("batches", [self._structure, structure])
        leaves = iter(_leaves(self._tree))
        for leaf in _leaves(tree):
            next(leaves).append(leaf)

    def _open(self, leaf: Any) -> Any:
        return _ObjectRows() if isinstance(leaf, Objects) else Rows(**self._options)

    def here(self) -> Any:
        """Return what this rank holds as NumPy arrays, concatenated over batches; None if nothing was kept."""
        self.to_host()
        return _map_leaves(self._tree, lambda rows: rows.array())

    def joined(self, group: Group, *, is_interleaved: bool) -> Any:
        """Return everything as NumPy arrays, concatenated over batches and ranks; None if nothing was kept.

        Lengths that differ beyond the first dimension are padded on the right with -100. Collective.

        Args:
            group: The ranks.
            is_interleaved: Rank r of W held batches r, r + W, ...; else each rank held a contiguous run.

        Raises:
            TaskError: Ranks hold what cannot be joined.
        """
        if group.world_size == 1:
            return self.here()
        self.to_host()
        held = [structure for structure in group.gather_object(self._structure) if structure is not None]
        if any(structure != held[0] for structure in held):
            raise _mismatch("processes", held)
        if not held:
            return None
        leaves = _leaves(self._tree)[::-1]

        def join(kind: Any) -> Any:
            # A rank without batches knows no structure: it learns it from the others, and sends nothing.
            mine = leaves.pop() if leaves else None
            places = _places(group.gather_object(mine.batch_sizes if mine else []), is_interleaved=is_interleaved)
            if kind == _OBJECTS:
                return _gather_objects(mine, group, places)
            return _gather_rows(mine, group, places, folder=self._folder)

        return _fill(held[0], join)


class _ObjectRows:
    """Take objects, one per row."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self._objects: list[Any] = []

    def append(self, objects: Objects) -> None:
        self._objects.extend(objects)
        self.batch_sizes.append(len(objects))

    def array(self) -> list[Any]:
        return self._objects


def as_tensors(tree: Any, *, takes_objects: bool = False) -> Any:
    """Return nested values with arrays and numbers as tensors, and objects, where they are taken, as `Objects`.

    Raises:
        TaskError: A value is neither; the error names its type.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    if isinstance(tree, Mapping):
        return {key: as_tensors(entry, takes_objects=takes_objects) for key, entry in tree.items() if entry is not None}
    if takes_objects and isinstance(tree, list):
        return Objects(map(to_plain, tree))
    if isinstance(tree, (list, tuple)):
        return tuple(as_tensors(entry, takes_objects=takes_objects) for entry in tree if entry is not None)
    if isinstance(tree, (bool, int, float)) or getattr(getattr(tree, "dtype", None), "kind", "O") in "biufc":
        return torch.as_tensor(tree)
    if takes_objects:
        return Objects([to_plain(tree)])
    raise TaskError(
        "Predictions were to be kept.",
        f"They hold a {type(tree).__name__}, and only tensors, arrays and numbers can be kept.",
        "Leave it out with ignore_keys or preprocess_logits_for_metrics, set eval_use_gather_object=True to keep "
        "text and the like, or use torchmetrics in a TaskModule.",
    )


def concatenate(trees: Sequence[Any], *, takes_objects: bool = False) -> Any:
    """Concatenate nested host tensors along the first dimension, the others padded with -100, as NumPy arrays."""
    kept = Kept(takes_objects=takes_objects)
    for tree in trees:
        kept.add(tree)
    return kept.here()


def to_numpy(tree: Any) -> Any:
    """Turn nested host tensors into NumPy arrays; bfloat16, which NumPy lacks, becomes float32."""
    return map_tensors(tree, _tensor_to_numpy)


def put_back(tree: Any, order: Any, *, folder: Path | None = None) -> Any:
    """Put the rows of nested arrays where their samples stand in the dataset; arrays of other lengths stay.

    Several rows for each sample, such as the sequences of `num_return_sequences`, stay together.

    Args:
        tree: What `Kept.joined` gave.
        order: The places of the samples in the order they were read.
        folder: Hold arrays in files there, mapped into memory; None holds them in memory.
    """
    if isinstance(tree, Mapping):
        return {key: put_back(value, order, folder=folder) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(put_back(value, order, folder=folder) for value in tree)
    if not isinstance(tree, (numpy.ndarray, list)) or not len(order) or len(tree) % len(order):
        return tree
    per_sample = len(tree) // len(order)
    rows = (numpy.argsort(order)[:, None] * per_sample + numpy.arange(per_sample)).ravel()
    if isinstance(tree, list):
        return [tree[row] for row in rows]
    if folder is None:
        return tree[rows]
    ordered = allocate(tree.shape, torch.from_numpy(tree).dtype, folder=folder)
    step = max(1, _CHUNK_BYTES // max(1, tree[:1].nbytes))
    for start in range(0, len(rows), step):
        ordered[start : start + step] = tree[rows[start : start + step]]
    return ordered


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().unsqueeze(0) if tensor.dim() == 0 else tensor.detach()


def _is_on_host(tree: Any) -> bool:
    return all(leaf.device.type == "cpu" for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor))


def _tensor_to_numpy(tensor: torch.Tensor) -> Array:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


# -- over ranks ------------------------------------------------------------------------------------------------------


def _places(batch_sizes: Sequence[Sequence[int]], *, is_interleaved: bool) -> list[torch.Tensor]:
    """Return for each rank where its rows stand in the data.

    Args:
        batch_sizes: For each rank, the sizes of its batches in its own order.
        is_interleaved: Ranks took batches in turn; else each holds a contiguous run.
    """
    places: list[list[range]] = [[] for _ in batch_sizes]
    num_turns = max(map(len, batch_sizes))
    ranks = range(len(batch_sizes))
    in_turn = ((rank, turn) for turn in range(num_turns) for rank in ranks)
    in_runs = ((rank, turn) for rank in ranks for turn in range(num_turns))
    start = 0
    for rank, turn in in_turn if is_interleaved else in_runs:
        if turn < len(batch_sizes[rank]):
            places[rank].append(range(start, start + batch_sizes[rank][turn]))
            start += batch_sizes[rank][turn]
    return [torch.tensor([row for run in runs for row in run], dtype=torch.int64) for runs in places]


def _gather_rows(mine: Any, group: Group, places: list[torch.Tensor], *, folder: Path | None) -> Array:
    """Bring all ranks' rows together piece by piece, each where it stands in the data; collective."""
    own = None if mine is None else torch.from_numpy(mine.array())
    kinds = group.gather_object(None if own is None else [str(own.dtype).removeprefix("torch."), list(own.shape[1:])])
    examples = [torch.empty((0, *kind[1]), dtype=getattr(torch, kind[0])) for kind in kinds if kind is not None]
    shape, dtype = common_kind(examples)
    own = examples[0] if own is None else own
    joined = allocate((sum(map(len, places)), *shape), dtype, folder=folder)
    row_bytes = max(1, joined[:1].nbytes)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, max(map(len, places)), step):
        rows = group.gather(padded(own[start : start + step], shape, dtype).to(group.device)).cpu()
        where = torch.cat([rank[start : start + step] for rank in places])
        joined[where.numpy()] = rows.numpy()
    return joined


def _gather_objects(mine: Any, group: Group, places: list[torch.Tensor]) -> list[Any]:
    joined: list[Any] = [None] * sum(map(len, places))
    for rank, found in enumerate(group.gather_object(encode([] if mine is None else mine.array()))):
        for place, value in zip(places[rank].tolist(), decode(found), strict=True):
            joined[place] = value
    return joined


# -- structures ------------------------------------------------------------------------------------------------------

_TENSOR, _OBJECTS = 0, 1


def _structure(tree: Any) -> Any:
    """Describe a nested structure as JSON data: a leaf is a number, a tuple a list, a mapping its items in order."""
    if isinstance(tree, dict):
        return {"items": [[key, _structure(value)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return [_structure(value) for value in tree]
    return _OBJECTS if isinstance(tree, Objects) else _TENSOR


def _fill(structure: Any, make_leaf: Callable[[Any], Any]) -> Any:
    if isinstance(structure, dict):
        return {key: _fill(value, make_leaf) for key, value in structure["items"]}
    if isinstance(structure, list):
        return tuple(_fill(value, make_leaf) for value in structure)
    return make_leaf(structure)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (dict, tuple)):
        return [leaf for value in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(value)]
    return [] if tree is None else [tree]


def _map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _map_leaves(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_map_leaves(value, function) for value in tree)
    return None if tree is None else function(tree)


def _mismatch(of: str, structures: list[Any]) -> TaskError:
    return TaskError(
        f"Predictions of several {of} were to be joined.",
        "They differ in their keys, or in how many tensors they hold.",
        "Return the same structure for each batch, leave the differing outputs out with ignore_keys or "
        "preprocess_logits_for_metrics, or set eval_do_concat_batches=False.",
        structures=structures,
    )
