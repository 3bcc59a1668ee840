"""Positions within an epoch, in samples if they can be counted, and loaders that begin there.

A run resumed with another batch size or number of ranks may be at a sample where no batch of the new size begins. The
rest of that epoch is then cut into batches from exactly that sample on. Positions in batches are used for loaders that
cannot be inspected, and within the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hftrain.core.errors import CheckpointError
from hftrain.data.datasets import StreamWrapper, has_length
from hftrain.data.samplers import EvenedSampler, Later, RankBatches, is_cut, is_rank_aware
from hftrain.data.seeding import SeededBatches
from hftrain.data.sharding import DispatchLoader, is_plain_loader, on_reader, rebuild_loader
from hftrain.data.states import StatefulLoader


class OffsetStream(StreamWrapper):
    """Read and drop the first samples of a stream."""

    def __init__(self, dataset: Any, *, offset: int) -> None:
        super().__init__(dataset)
        self._offset = offset

    @property
    def generator(self) -> Any:
        """The stream's own generator, which is seeded for each epoch."""
        return getattr(self.dataset, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataset, self._offset, None)

    def __len__(self) -> int:
        return max(0, len(self.dataset) - self._offset)


def samples_per_round(loader: Any, *, world_size: int) -> int | None:
    """Return how many samples all ranks read together for one micro-step.

    None if batches may differ in size, or come from several workers that each read a part of a stream, so that
    the order of the samples depends on the batch size.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> samples_per_round(DataLoader(range(10), batch_size=4), world_size=2)
        8
    """
    if isinstance(loader, DispatchLoader):
        loader = loader.loader
    if not is_plain_loader(loader):
        return None
    if isinstance(loader.dataset, IterableDataset):
        is_countable = loader.batch_size is not None and loader.num_workers <= 1
        return loader.batch_size * world_size if is_countable else None
    part, num_sharing = _batches_of(loader), 1
    while _is_wrapper(part):
        num_sharing *= part.num_processes if getattr(part, "split_batches", False) else 1
        part = _inside(part)
    return part.batch_size * world_size // num_sharing if type(part) is BatchSampler else None


def has_own_shares(loader: Any, *, world_size: int) -> bool:
    """Return whether the data shards itself over ranks, so that the shares for other numbers of ranks are unknown.

    The shares of hftrain, accelerate and torch's `DistributedSampler` are known: each round takes the next samples of
    one order.
    """
    if world_size == 1 or isinstance(loader, DispatchLoader) or not is_plain_loader(loader):
        return False
    part = loader.dataset if isinstance(loader.dataset, IterableDataset) else _batches_of(loader)
    while _is_wrapper(part) or type(part) is BatchSampler:
        if is_cut(part):
            return False
        part = _inside(part)
    return not isinstance(part, DistributedSampler)


def begin_at(loader: Any, *, offset: int = 0, skip: int = 0) -> tuple[Any, int]:
    """Make a loader begin within an epoch, by drawing only indices if possible.

    Args:
        loader: This rank's loader.
        offset: Samples of all ranks together before the first batch.
        skip: Batches of this rank to skip after them.

    Returns:
        The loader, and how many of its batches must be read and dropped first.

    Raises:
        CheckpointError: There is an offset, and the order in which all ranks read is unknown.
    """
    if not (offset or skip):
        return loader, 0
    if isinstance(loader, DispatchLoader):
        inner, to_drop = begin_at(loader.loader, offset=offset, skip=skip * loader.world_size)
        return on_reader(loader, lambda _: inner), to_drop // loader.world_size
    if isinstance(loader, StatefulLoader) and not offset and loader.skip(skip):
        return loader, 0
    if offset and not is_plain_loader(loader):
        raise _cannot_begin(f"a {type(loader).__name__}, which iterates in its own way", offset)
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if not offset and (is_stream or not is_plain_loader(loader)):
        return loader, skip
    # This loader's workers must end with the epoch; the original loader's workers wait for the next one.
    own: dict[str, Any] = {"persistent_workers": False}
    if is_stream:
        return rebuild_loader(loader, dataset=_shifted(loader.dataset, offset), **own), skip
    order = _shifted(_batches_of(loader), offset) if offset else _batches_of(loader)
    return rebuild_loader(loader, order=Later(order, skip) if skip else order, **own), 0


def num_batches_from(loader: Any, offset: int) -> int | None:
    """Return the number of batches of an epoch after `offset` samples of all ranks; None if unknown."""
    later = begin_at(loader, offset=offset)[0]
    return len(later) if has_length(later) else None


def _batches_of(loader: Any) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _shifted(part: Any, offset: int) -> Any:
    """Copy a chain of samplers or streams with the offset inserted below the batching and sharding."""
    if _is_wrapper(part) or type(part) is BatchSampler:
        changed = copy.copy(part)
        setattr(changed, _name_inside(part), _shifted(_inside(part), offset))
        return changed
    if is_rank_aware(part) or isinstance(part, BatchSampler):
        raise _cannot_begin(f"a {type(part).__name__}, which batches or shards the data itself", offset)
    return OffsetStream(part, offset=offset) if isinstance(part, IterableDataset) else Later(part, offset)


def _is_wrapper(part: Any) -> bool:
    """Recognise hftrain's own wrappers of batches or streams, and accelerate's by name, to import nothing."""
    known = (RankBatches, SeededBatches, Later, EvenedSampler)
    if getattr(part, "passes_batches_on", False):
        return True
    return isinstance(part, known) or type(part).__name__ in ("BatchSamplerShard", "IterableDatasetShard")


def _name_inside(part: Any) -> str:
    return next(name for name in ("batch_sampler", "sampler", "dataset") if hasattr(part, name))


def _inside(part: Any) -> Any:
    return getattr(part, _name_inside(part))


def _cannot_begin(what: str, offset: int) -> CheckpointError:
    return CheckpointError(
        "A run was resumed with another batch size or number of processes.",
        f"It stands {offset} samples into a batch of the new size, and its data comes from {what}.",
        "Resume with the batch size and number of processes of the checkpoint, or from an epoch's end.",
    )
