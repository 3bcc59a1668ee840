"""Collecting predictions: batch by batch, padded if lengths differ, in the data's order over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any

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


class _Keeper:
    """Collect one stream of nested tensors (predictions, labels, inputs or losses) and move it to the host."""

    def __init__(self, *, moves_every: int | None = None, takes_objects: bool = False) -> None:
        # Batches kept on the device before they move to the host; None moves them at the end.
        self._moves_every = moves_every
        self._takes_objects = takes_objects
        self._waiting: list[Any] = []
        # What is on its way to the host: it has arrived when the next batch is there.
        self._arriving: list[Callable[[], Any]] = []

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
        self._waiting.append(tree)
        if len(self._waiting) == self._moves_every:
            self._begin_to_move()

    def _begin_to_move(self) -> None:
        """Begin to move what is on the device to host memory, and store what was moved before."""
        arriving, self._arriving = self._arriving[::-1], []
        while arriving:
            self._store(arriving.pop()())
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            self._arriving.append(to_host(waiting.pop()))

    def to_host(self) -> None:
        """Move batches that are still on the device to host memory; the host waits for them."""
        self._begin_to_move()
        self._begin_to_move()

    def _store(self, tree: Any) -> None:
        raise NotImplementedError


class KeptBatches(_Keeper):
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
        mine = [*map(encode, self._batches), *[None] * (max(counts) - len(self._batches))]
        turns = [[decode(batch) for batch in group.gather_object(each)] for each in mine]
        in_order = turns if is_interleaved else zip(*turns, strict=True)
        return [batch for batches in in_order for batch in batches if batch is not None] or None


class Kept(_Keeper):
    """Keep a stream as a whole, without copies if the number of samples is known."""

    def __init__(self, *, num_samples: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._num_samples = num_samples or 0
        # The rows of each leaf; the structure of the batches, and which of their leaves are objects.
        self._rows: list[Any] = []
        self._form: tuple[pytree.TreeSpec, list[bool]] | None = None

    def _store(self, tree: Any) -> None:
        leaves, spec = pytree.tree_flatten(tree)
        form = spec, [isinstance(leaf, Objects) for leaf in leaves]
        if self._form is None:
            self._form = form
            whole = self._num_samples
            self._rows = [_ObjectRows() if is_objects else Rows(num_expected=whole) for is_objects in form[1]]
        elif form != self._form:
            raise _mismatch("batches", [self._form, form])
        for rows, leaf in zip(self._rows, leaves, strict=True):
            rows.append(leaf)

    def joined(self, group: Ranks, *, is_interleaved: bool, order: Any = None) -> Any:
        """Return everything as NumPy arrays, concatenated over batches and ranks; None if nothing was kept.

        Lengths that differ beyond the first dimension are padded on the right with -100. Collective.

        Args:
            order: The dataset indices of the samples in reading order, if the rows are to be in dataset order.
        """
        self.to_host()
        if group.world_size == 1:
            whole = self._form and pytree.tree_unflatten([rows.array() for rows in self._rows], self._form[0])
            return whole if order is None else put_back(whole, order)
        found = group.gather_object(self._form and [pytree.treespec_dumps(self._form[0]), self._form[1]])
        forms = [(pytree.treespec_loads(text), kinds) for text, kinds in filter(None, found)]
        if any(form != forms[0] for form in forms):
            raise _mismatch("processes", forms)
        if not forms:
            return None
        spec, kinds = forms[0]
        joined: list[Any] = []
        # A rank without batches gets the structure from the others and sends no rows.
        for is_objects, mine in zip_longest(kinds, self._rows):
            places = _places(group.gather_object(mine.batch_sizes if mine else []), is_interleaved=is_interleaved)
            places = _in_order(places, order)
            rows = None if mine is None else mine.array()
            joined.append(
                _gather_objects(rows or [], group, places) if is_objects else _gather_rows(rows, group, places)
            )
        return pytree.tree_unflatten(joined, spec)


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
        return {key: as_tensors(entry, takes_objects=takes_objects) for key, entry in tree.items() if _is_kept(entry)}
    if takes_objects and isinstance(tree, list):
        return Objects(map(to_plain, tree))
    if isinstance(tree, (list, tuple)):
        return tuple(as_tensors(entry, takes_objects=takes_objects) for entry in tree if _is_kept(entry))
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


def _is_kept(value: Any) -> bool:
    return value is not None and not is_cache(value)


def check_rows(predictions: Any, labels: Any, num_samples: int) -> None:
    """Warn of arrays without a sample dimension: their rows are no multiple of the samples, nor those of the labels.

    Lists of objects have one per sample or batch, and a model's ``"loss"`` is known to be one number per batch.
    """
    num_labels = {len(each) for each in pytree.tree_leaves(labels) if isinstance(each, numpy.ndarray)}
    leaves, _ = pytree.tree_flatten_with_path(predictions, is_leaf=lambda each: isinstance(each, list))
    for name, each in ((pytree.keystr(path), each) for path, each in leaves):
        is_odd = isinstance(each, numpy.ndarray) and len(each) % num_samples and len(each) not in num_labels
        if is_odd and name != "['loss']":
            warn_once(
                f"predictions{name} has the shape {each.shape} for {num_samples} samples: the model's "
                "output has no sample dimension, and its batches were put one after the other. Leave it out with "
                "ignore_keys or preprocess_logits_for_metrics, or return one row per sample."
            )


def put_back(tree: Any, order: Any) -> Any:
    """Return nested arrays with rows in dataset order; arrays of other lengths do not change.

    Several rows of a sample, such as the sequences of `num_return_sequences`, stay together.

    Args:
        order: The dataset indices of the samples in reading order.
    """
    return pytree.tree_map(partial(_put_back, order=order), tree, is_leaf=lambda each: isinstance(each, list))


def _put_back(found: Any, *, order: Any) -> Any:
    if found is None or not len(order) or len(found) % len(order):
        return found
    per_sample = len(found) // len(order)
    rows = (numpy.argsort(order)[:, None] * per_sample + numpy.arange(per_sample)).ravel()
    return [found[row] for row in rows] if isinstance(found, list) else found[rows]


def _mismatch(of: str, forms: list[tuple[pytree.TreeSpec, list[bool]]]) -> TaskError:
    return TaskError(
        f"Predictions of several {of} were to be joined.",
        "They differ in their keys, or in how many tensors they hold.",
        "Return the same structure for each batch, leave the differing outputs out with ignore_keys or "
        "preprocess_logits_for_metrics, or set eval_do_concat_batches=False.",
        structures=[
            pytree.tree_unflatten(["objects" if each else "tensor" for each in kinds], spec) for spec, kinds in forms
        ],
    )


# -- over ranks ------------------------------------------------------------------------------------------------------


def _places(batch_sizes: Sequence[Sequence[int]], *, is_interleaved: bool) -> list[Array]:
    """Return for each rank the positions of its rows in the data, from the sizes of its batches."""
    places: list[list[Array]] = [[numpy.empty(0, numpy.int64)] for _ in batch_sizes]
    in_runs = [[(rank, size) for size in sizes] for rank, sizes in enumerate(batch_sizes)]
    start = 0
    for rank, size in filter(None, chain.from_iterable(zip_longest(*in_runs) if is_interleaved else in_runs)):
        places[rank].append(numpy.arange(start, start + size))
        start += size
    return [numpy.concatenate(runs) for runs in places]


def _in_order(places: list[Array], order: Any) -> list[Array]:
    """Return for each rank the positions of its rows in the dataset, for samples read in `order` (see `put_back`)."""
    total = sum(map(len, places))
    if order is None or not len(order) or total % len(order):
        return places
    per_sample = total // len(order)
    place = numpy.empty(len(order), numpy.int64)
    place[numpy.argsort(order)] = numpy.arange(len(order))
    return [place[rows // per_sample] * per_sample + rows % per_sample for rows in places]


def _gather_rows(mine: Array | None, group: Ranks, places: list[Array]) -> Array:
    """Join all ranks' rows chunk by chunk, each at its position in the data; collective."""
    own = None if mine is None else torch.from_numpy(mine)
    kinds = group.gather_object(None if own is None else [str(own.dtype).removeprefix("torch."), list(own.shape[1:])])
    examples = [torch.empty((0, *kind[1]), dtype=getattr(torch, kind[0])) for kind in kinds if kind is not None]
    shape, dtype = common_kind(examples)
    own = examples[0] if own is None else own
    joined = allocate((sum(map(len, places)), *shape), dtype)
    step = max(1, _CHUNK_BYTES // max(1, joined[:1].nbytes * group.world_size))
    for start in range(0, max(map(len, places)), step):
        found = group.gather(padded(own[start : start + step], shape, dtype).to(group.device)).cpu()
        joined[numpy.concatenate([rank[start : start + step] for rank in places])] = found.numpy()
    return joined


def _gather_objects(mine: list[Any], group: Ranks, places: list[Array]) -> list[Any]:
    joined: list[Any] = [None] * sum(map(len, places))
    step = max(1, _CHUNK_OBJECTS // group.world_size)
    for start in range(0, max(map(len, places)), step):
        told = group.gather_object(encode(mine[start : start + step]))
        for where, found in zip(places, told, strict=True):
            for place, value in zip(where[start : start + step].tolist(), decode(found), strict=True):
                joined[place] = value
    return joined
