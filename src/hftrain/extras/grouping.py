"""Group samples of similar length to reduce padding."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.core.seed import preserved_rng
from hftrain.data.columns import removable_columns
from hftrain.data.samplers import ArraySampler, shuffled

# Batches that are sorted together: more means less padding, fewer means more randomness.
_MOST_BATCHES = 50
_FEWEST_GROUPS = 4
_SORTED_AT_ONCE = 2**20

# A signed integer type; int32 if we choose it and the numbers fit.
Lengths = numpy.ndarray[Any, numpy.dtype[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthConfig:
    """The source of sample lengths, and how training orders samples by them.

    Args:
        input_name: The field of a sample that determines its length.
        column: A column of a `datasets.Dataset` that holds the lengths, if it exists.
        batch_size: Samples of similar length: those of one optimizer update, over all ranks.
        shuffles_batches: Shuffle the batches too (`sortish_sampler`), and evaluate from long to short.
    """

    input_name: str = "input_ids"
    column: str | None = None
    batch_size: int = 1
    seed: int = 42
    shuffles_batches: bool = False


class LengthShuffledSampler(ArraySampler):
    """Shuffle so that neighbours have similar lengths; the longest sample comes first, to run out of memory early.

    The order of epoch e depends only on `seed + e`. A random order is cut into groups of up to 50 batches, and
    each group is sorted from long to short. `shuffles_batches` also shuffles the full batches, to avoid runs of
    ever shorter batches.

    Example:
        >>> sampler = LengthShuffledSampler([1, 9, 2, 8], batch_size=2, seed=0)
        >>> next(iter(sampler)), sorted(sampler)
        (1, [0, 1, 2, 3])
    """

    def __init__(self, lengths: Any, *, batch_size: int, seed: int, shuffles_batches: bool = False) -> None:
        self.lengths = _as_array(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self._shuffles_batches = shuffles_batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def draw(self) -> Lengths:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = grouped_order(self.lengths, self.batch_size, generator=generator)
        if self._shuffles_batches:
            self._shuffle_batches(order, generator)
        return order

    def __len__(self) -> int:
        return len(self.lengths)

    def _shuffle_batches(self, order: Lengths, generator: torch.Generator) -> None:
        """Put full batches in random order, the one with the longest sample first; a short one stays last."""
        num_full = len(order) // self.batch_size
        if num_full > 1:
            batches = order[: num_full * self.batch_size].reshape(num_full, self.batch_size)
            batches[1:] = batches[1:][shuffled(num_full - 1, generator).numpy()]


def grouped_order(lengths: Any, batch_size: int, *, generator: torch.Generator | None = None) -> Lengths:
    """Return a random order, cut into groups that are each sorted from long to short; the longest sample comes first.

    A group is up to 50 batches.
    """
    lengths = _as_array(lengths)
    num = len(lengths)
    size = max(min(num // (batch_size * _FEWEST_GROUPS), _MOST_BATCHES), 1) * batch_size
    order: Lengths = shuffled(num, generator).numpy()
    # In place, some groups at a time.
    num_sorted = max(_SORTED_AT_ONCE // size, 1) * size
    for start in range(0, num, num_sorted):
        section = order[start : start + num_sorted]
        num_grouped = len(section) // size * size
        for groups in (section[:num_grouped].reshape(-1, size), section[num_grouped:].reshape(1, -1)):
            from_long = numpy.argsort(-lengths[groups], axis=1, kind="stable")
            groups[:] = numpy.take_along_axis(groups, from_long, axis=1)
    if num:
        longest = int(lengths[order[::size]].argmax()) * size
        order[[0, longest]] = order[[longest, 0]]
    return order


class LengthSortedSampler(ArraySampler):
    """Read from long to short; with several ranks, each gets both long and short samples.

    Args:
        world_size: The number of ranks, which read contiguous shares.
        unit: Samples that stay together; an incomplete last unit (the shortest samples) is left out.

    Example:
        >>> LengthSortedSampler([1, 3, 2], world_size=1).reading_order.tolist()
        [1, 2, 0]
    """

    def __init__(self, lengths: Any, *, world_size: int = 1, unit: int = 1) -> None:
        lengths = numpy.asarray(lengths, dtype=numpy.int64)
        num_units = len(lengths) // unit
        # The bounds of the ranks' shares, as in `ContiguousShard`; each share is filled in turn.
        bounds = numpy.arange(world_size + 1) * num_units // world_size * unit
        places = numpy.arange(num_units * unit) - numpy.repeat(bounds[:-1], numpy.diff(bounds))
        dtype = numpy.int32 if len(lengths) < 2**31 else numpy.int64
        order: Lengths = numpy.empty(num_units * unit, dtype=dtype)
        order[numpy.argsort(places, kind="stable")] = numpy.argsort(-lengths, kind="stable")[: len(order)]
        self.reading_order = order

    def draw(self) -> Lengths:
        return self.reading_order

    def __len__(self) -> int:
        return len(self.reading_order)


def check_lengths(dataset: Any, config: LengthConfig) -> None:
    """Refuse a stream, or samples without the input; reads one sample."""
    if isinstance(dataset, IterableDataset):
        raise _no_lengths(dataset, "A stream is read in its own order.", "Use a dataset with __len__ and __getitem__.")
    if _has_column(dataset, config.column) or not len(dataset):
        return
    with preserved_rng():
        _length_of(dataset[0], dataset, config)


def sample_lengths(dataset: Any, config: LengthConfig) -> Lengths:
    """Return the length of each sample: from the length column, else from the input.

    A `datasets.Dataset` is read by columns; other data is read once, sample by sample, and the random state
    is restored afterwards.
    """
    check_lengths(dataset, config)
    if _has_column(dataset, config.column):
        return _column_of_lengths(dataset, str(config.column))
    if _has_column(dataset, config.input_name):
        lengths = _lengths_of_lists(dataset, config.input_name)
        if lengths is not None:
            return lengths
    with preserved_rng():
        lengths_read = (_length_of(dataset[index], dataset, config) for index in range(len(dataset)))
        return _in_few_bytes(numpy.fromiter(lengths_read, dtype=numpy.int64, count=len(dataset)))


def length_sampler(
    dataset: Any, config: LengthConfig, *, is_training: bool, world_size: int = 1, unit: int = 1
) -> ArraySampler:
    """Create the sampler of `config`; see `LengthShuffledSampler` and `LengthSortedSampler`."""
    lengths = sample_lengths(dataset, config)
    if not is_training:
        return LengthSortedSampler(lengths, world_size=world_size, unit=unit)
    return LengthShuffledSampler(
        lengths, batch_size=config.batch_size, seed=config.seed, shuffles_batches=config.shuffles_batches
    )


def _as_array(lengths: Any) -> Lengths:
    array: Lengths = numpy.asarray(lengths)
    return array if array.dtype.kind == "i" else array.astype(numpy.int64)


def _in_few_bytes(lengths: Lengths) -> Lengths:
    return lengths.astype(numpy.int32, copy=False) if lengths.max(initial=0) < 2**31 else _as_array(lengths)


def _has_column(dataset: Any, name: str | None) -> bool:
    return name is not None and name in (removable_columns(dataset) or ())


def _column_of_lengths(dataset: Any, name: str) -> Lengths:
    lengths = numpy.asarray(dataset.select_columns([name]).with_format("numpy")[:][name])
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ConfigError(
            f"Cannot use length_column_name={name!r}.",
            "That column does not hold one whole number for each sample.",
            "Name the column that does, or leave it out to measure the inputs themselves.",
            dtype=str(lengths.dtype),
        )
    return _in_few_bytes(lengths)


def _lengths_of_lists(dataset: Any, name: str) -> Lengths | None:
    """Return the list lengths of a column without reading the lists; None if it has another type."""
    parts = []
    for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=100_000):
        for chunk in table[name].chunks:
            if not hasattr(chunk, "value_lengths") or chunk.null_count:
                return None
            parts.append(chunk.value_lengths().to_numpy(zero_copy_only=False))
    return _in_few_bytes(numpy.concatenate(parts))


def _length_of(sample: Any, dataset: Any, config: LengthConfig) -> int:
    value = sample.get(config.input_name) if isinstance(sample, Mapping) else None
    if not isinstance(value, Sized):
        fields = f" (there are {', '.join(map(str, sample))})" if isinstance(sample, Mapping) else ""
        raise _no_lengths(
            dataset,
            f"A sample has no {config.input_name!r} with a length{fields}.",
            "Tokenize texts first (dataset.map), or name the lengths of a datasets.Dataset in length_column_name.",
        )
    return len(value)


def _no_lengths(dataset: Any, reason: str, remedy: str) -> ConfigError:
    problem = (
        f"Cannot read the lengths of {type(dataset).__name__} (to pack it, or for group_by_length or sortish_sampler)."
    )
    return ConfigError(problem, reason, remedy)
