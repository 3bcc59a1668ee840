"""Collecting predictions: batch by batch, padded if lengths differ, in the data's order over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy
import torch

from hftrain.core.devices import to_host
from hftrain.core.errors import TaskError
from hftrain.core.log import warn_once
from hftrain.core.tree import as_array, detach, is_cache, map_tensors, pytree
from hftrain.extras.predictions.buffers import Array, Rows, allocate, common_kind, padded
from hftrain.extras.predictions.objects import Objects, decode, encode, to_plain
from hftrain.strategies.base import Ranks

# How much all ranks together send at once.
_CHUNK_BYTES = 1 << 22
_CHUNK_OBJECTS = 1 << 14


class _Collector:
    """Collect one stream of nested tensors (predictions, labels, inputs or losses) and move it to the host."""

    def __init__(self, *, moves_every: int | None = None, takes_objects: bool = False) -> None:
        # Batches kept on the device before they move to the host; None moves them at the end.
        self._moves_every = moves_every
        self._takes_objects = takes_objects
        self._on_device: list[Any] = []
        # What is on its way to the host: it has arrived when the next batch is there.
        self._transfers: list[Callable[[], Any]] = []

    def add(self, tree: Any) -> None:
        """Keep one batch's tensors, arrays and numbers (0-d ones become rows); None is skipped."""
        if tree is None:
            return
        tree = map_tensors(detach(as_tensors(tree, takes_objects=self._takes_objects)), torch.atleast_1d)
        leaves, _ = pytree.tree_flatten(tree)
        if all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor)):
            self.to_host()
            self._store(tree)  # now: a model may return the same memory for each batch
            return
        self._on_device.append(tree)
        if len(self._on_device) == self._moves_every:
            self._begin_to_move()

    def _begin_to_move(self) -> None:
        """Begin to move what is on the device to host memory, and store what was moved before."""
        transfers, self._transfers = self._transfers[::-1], []
        while transfers:
            self._store(transfers.pop()())
        batches, self._on_device = self._on_device[::-1], []
        while batches:
            self._transfers.append(to_host(batches.pop()))

    def to_host(self) -> None:
        """Move batches that are still on the device to host memory; the host waits for them."""
        self._begin_to_move()
        self._begin_to_move()

    def _store(self, tree: Any) -> None:
        raise NotImplementedError


class BatchCollector(_Collector):
    """Keep a stream batch by batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._batches: list[Any] = []

    def _store(self, tree: Any) -> None:
        self._batches.append(map_tensors(tree, as_array))

    def joined(self, group: Ranks, *, is_interleaved: bool, order: Any = None) -> list[Any] | None:
        """Return all ranks' batches as NumPy arrays, one entry each; None if nothing was kept. Collective.

        Args:
            is_interleaved: Rank r of W held batches r, r + W, ...; else each rank held a contiguous run.
            order: Not used: batches stay as they were read.
        """
        self.to_host()
        if group.world_size == 1:
            return self._batches or None
        counts = group.gather_object(len(self._batches))
        own_batches = [*map(encode, self._batches), *[None] * (max(counts) - len(self._batches))]
        turns = [[decode(batch) for batch in group.gather_object(own_batch)] for own_batch in own_batches]
        ordered = turns if is_interleaved else zip(*turns, strict=True)
        return [batch for batches in ordered for batch in batches if batch is not None] or None


class RowCollector(_Collector):
    """Keep a stream as a whole, without copies if the number of samples is known."""

    def __init__(self, *, num_samples: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._num_samples = num_samples or 0
        self._rows: list[Any] = []  # of each leaf
        self._structure: _Structure | None = None

    def _store(self, tree: Any) -> None:
        """Append the leaves of a batch, each to its rows; the first batch decides the structure."""
        leaves, spec = pytree.tree_flatten(tree)
        structure = _Structure(spec, [isinstance(leaf, Objects) for leaf in leaves])
        if self._structure is None:
            self._structure = structure
            for is_objects in structure.are_objects:
                self._rows.append(_ObjectRows() if is_objects else Rows(num_expected=self._num_samples))
        elif structure != self._structure:
            raise _mismatch("batches", [self._structure, structure])
        for rows, leaf in zip(self._rows, leaves, strict=True):
            rows.append(leaf)

    def joined(self, group: Ranks, *, is_interleaved: bool, order: Any = None) -> Any:
        """Return everything as NumPy arrays, concatenated over batches and ranks; None if nothing was kept.

        Lengths that differ beyond the first dimension are padded on the right with -100. Collective.

        Args:
            order: The dataset indices of the samples in reading order, if the rows are to be in dataset order.
        """
        self.to_host()
        own = self._structure
        if group.world_size == 1:
            whole = own and pytree.tree_unflatten([rows.array() for rows in self._rows], own.spec)
            return whole if order is None else restore_order(whole, order)
        texts = group.gather_object(own and [pytree.treespec_dumps(own.spec), own.are_objects])
        structures = [_Structure(pytree.treespec_loads(text), kinds) for text, kinds in filter(None, texts)]
        if any(structure != structures[0] for structure in structures):
            raise _mismatch("processes", structures)
        if not structures:
            return None
        joined: list[Any] = []
        # A rank without batches gets the structure from the others and sends no rows.
        for is_objects, own_rows in zip_longest(structures[0].are_objects, self._rows):
            batch_sizes = group.gather_object(own_rows.batch_sizes if own_rows else [])
            positions = _dataset_positions(_row_positions(batch_sizes, is_interleaved=is_interleaved), order)
            rows = None if own_rows is None else own_rows.array()
            joined.append(
                _gather_objects(rows or [], group, positions) if is_objects else _gather_rows(rows, group, positions)
            )
        return pytree.tree_unflatten(joined, structures[0].spec)


class _Structure(NamedTuple):
    """The structure of a batch, and which of its leaves are objects."""

    spec: pytree.TreeSpec
    are_objects: list[bool]


class _ObjectRows:
    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self._objects: list[Any] = []

    def append(self, objects: Objects) -> None:
        self._objects.extend(objects)
        self.batch_sizes.append(len(objects))

    def array(self) -> list[Any]:
        return self._objects


def as_tensors(tree: Any, *, takes_objects: bool = False) -> Any:
    """Return nested values with arrays and numbers as tensors, and with `takes_objects` other values as `Objects`.

    Raises:
        TaskError: A value is neither; the error names its type.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    if isinstance(tree, Mapping):
        items = ((key, value) for key, value in tree.items() if _is_collected(value))
        return {key: as_tensors(value, takes_objects=takes_objects) for key, value in items}
    if takes_objects and isinstance(tree, list):
        return Objects(map(to_plain, tree))
    if isinstance(tree, (list, tuple)):
        return tuple(as_tensors(entry, takes_objects=takes_objects) for entry in tree if _is_collected(entry))
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


def _is_collected(value: Any) -> bool:
    return value is not None and not is_cache(value)


def check_rows(predictions: Any, labels: Any, num_samples: int) -> None:
    """Warn of arrays without a sample dimension: their rows are no multiple of the samples, nor those of the labels.

    Lists of objects have one per sample or batch, and a model's ``"loss"`` is known to be one number per batch.
    """
    num_labels = {len(leaf) for leaf in pytree.tree_leaves(labels) if isinstance(leaf, numpy.ndarray)}
    leaves, _ = pytree.tree_flatten_with_path(predictions, is_leaf=lambda leaf: isinstance(leaf, list))
    for name, leaf in ((pytree.keystr(path), leaf) for path, leaf in leaves):
        is_odd = isinstance(leaf, numpy.ndarray) and len(leaf) % num_samples and len(leaf) not in num_labels
        if is_odd and name != "['loss']":
            warn_once(
                f"predictions{name} has the shape {leaf.shape} for {num_samples} samples: the model's "
                "output has no sample dimension, and its batches were put one after the other. Leave it out with "
                "ignore_keys or preprocess_logits_for_metrics, or return one row per sample."
            )


def restore_order(tree: Any, order: Any) -> Any:
    """Return nested arrays with rows in dataset order; arrays of other lengths do not change.

    Several rows of a sample, such as the sequences of `num_return_sequences`, stay together.

    Args:
        order: The dataset indices of the samples in reading order.
    """
    return pytree.tree_map(partial(_restore_rows, order=order), tree, is_leaf=lambda leaf: isinstance(leaf, list))


def _restore_rows(rows: Any, *, order: Any) -> Any:
    if rows is None or not len(order) or len(rows) % len(order):
        return rows
    per_sample = len(rows) // len(order)
    indices = (numpy.argsort(order)[:, None] * per_sample + numpy.arange(per_sample)).ravel()
    return [rows[row] for row in indices] if isinstance(rows, list) else rows[indices]


def _mismatch(parts: str, structures: list[_Structure]) -> TaskError:
    return TaskError(
        f"Predictions of several {parts} were to be joined.",
        "They differ in their keys, or in how many tensors they hold.",
        "Return the same structure for each batch, leave the differing outputs out with ignore_keys or "
        "preprocess_logits_for_metrics, or set eval_do_concat_batches=False.",
        structures=[
            pytree.tree_unflatten(["objects" if is_object else "tensor" for is_object in are_objects], spec)
            for spec, are_objects in structures
        ],
    )


# -- over ranks ------------------------------------------------------------------------------------------------------


def _row_positions(batch_sizes: Sequence[Sequence[int]], *, is_interleaved: bool) -> list[Array]:
    """Return for each rank the positions of its rows in the data, from the sizes of its batches."""
    positions: list[list[Array]] = [[numpy.empty(0, numpy.int64)] for _ in batch_sizes]
    in_runs = [[(rank, size) for size in sizes] for rank, sizes in enumerate(batch_sizes)]
    start = 0
    for rank, size in filter(None, chain.from_iterable(zip_longest(*in_runs) if is_interleaved else in_runs)):
        positions[rank].append(numpy.arange(start, start + size))
        start += size
    return [numpy.concatenate(runs) for runs in positions]


def _dataset_positions(positions: list[Array], order: Any) -> list[Array]:
    """Return for each rank its rows' positions in the dataset, for samples read in `order`; see `restore_order`."""
    total = sum(map(len, positions))
    if order is None or not len(order) or total % len(order):
        return positions
    per_sample = total // len(order)
    dataset_positions = numpy.empty(len(order), numpy.int64)
    dataset_positions[numpy.argsort(order)] = numpy.arange(len(order))
    return [dataset_positions[rows // per_sample] * per_sample + rows % per_sample for rows in positions]


def _gather_rows(array: Array | None, group: Ranks, positions: list[Array]) -> Array:
    """Join all ranks' rows chunk by chunk, each at its position in the data; collective."""
    rows = None if array is None else torch.from_numpy(array)
    own = None if rows is None else [str(rows.dtype).removeprefix("torch."), list(rows.shape[1:])]
    kinds = filter(None, group.gather_object(own))
    examples = [torch.empty((0, *shape), dtype=getattr(torch, dtype)) for dtype, shape in kinds]
    shape, dtype = common_kind(examples)
    rows = examples[0] if rows is None else rows
    joined = allocate((sum(map(len, positions)), *shape), dtype)
    step = max(1, _CHUNK_BYTES // max(1, joined[:1].nbytes * group.world_size))
    for start in range(0, max(map(len, positions)), step):
        chunk = group.gather(padded(rows[start : start + step], shape, dtype).to(group.device)).cpu()
        joined[numpy.concatenate([rank[start : start + step] for rank in positions])] = chunk.numpy()
    return joined


def _gather_objects(own_objects: list[Any], group: Ranks, positions: list[Array]) -> list[Any]:
    joined: list[Any] = [None] * sum(map(len, positions))
    step = max(1, _CHUNK_OBJECTS // group.world_size)
    for start in range(0, max(map(len, positions)), step):
        gathered = group.gather_object(encode(own_objects[start : start + step]))
        for rank_positions, objects in zip(positions, gathered, strict=True):
            for position, value in zip(rank_positions[start : start + step].tolist(), decode(objects), strict=True):
                joined[position] = value
    return joined
