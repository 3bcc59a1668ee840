"""Lengths of datasets and loaders, if they are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset

from hftrain.core.tree import batch_size_of
from hftrain.data.wrappers import StreamWrapper


def has_length(obj: Any) -> bool:
    """Return whether `len(obj)` works.

    Example:
        >>> has_length([1, 2]), has_length(iter([1, 2]))
        (True, False)
    """
    try:
        len(obj)
    except (TypeError, AttributeError, NotImplementedError):
        return False
    return True


def num_examples(loader: Any, *, batch_size: int = 1) -> int:
    """Count the samples of a loader, over all ranks if its dataset has a length; `TypeError` without any length.

    Without a dataset's length: the sizes of a list's batches, or batches times the loader's (or else the given) size.

    Source:
        The documented `Trainer.num_examples`.
    """
    dataset = whole_dataset(getattr(loader, "dataset", None))
    if has_length(dataset):
        return len(dataset)
    if isinstance(loader, Sequence):
        return sum(batch_size_of(batch) or batch_size for batch in loader)
    batches = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None) or batch_size
    return len(loader) * int(size)


def expected_samples(loader: Any) -> int | None:
    """Return the largest number of samples that this rank's loader can yield; None if unknown.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> expected_samples(DataLoader(range(10), batch_size=4)), expected_samples(iter([]))
        (10, None)
    """
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None or not has_length(loader):
        return None
    num_samples = len(loader) * int(batch_size)
    sampler: Any = getattr(loader, "sampler", None)
    return min(num_samples, len(sampler)) if has_length(sampler) else num_samples


def whole_dataset(dataset: Any) -> Any:
    """Return the dataset inside the wrappers that give each rank its share of a stream."""
    while isinstance(dataset, StreamWrapper) or _is_foreign_shard(dataset):
        dataset = dataset.dataset
    return dataset


def _is_foreign_shard(dataset: Any) -> bool:
    """Recognise the wrappers of accelerate and transformers by name, to import neither."""
    return isinstance(dataset, IterableDataset) and type(dataset).__name__ == "IterableDatasetShard"
