"""Positions counted in samples: how many make a micro-step, and loaders that begin in the middle of an epoch.

A run that goes on with another batch size, or other ranks, may stand where no batch of the new size begins. The rest of
that epoch is then cut into batches from exactly that sample on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from hftrain.core.errors import CheckpointError
from hftrain.data.dispatch import DispatchLoader
from hftrain.data.samplers import EvenedSampler, RankBatches, SkippedBatches, is_rank_aware
from hftrain.data.seeding import SeededBatches
from hftrain.data.sharding import is_plain_loader, rebuild_loader
from hftrain.data.streams import BatchShardStream, EvenedStream
from hftrain.data.wrappers import StreamWrapper


class OffsetSampler(Sampler[Any]):
    """Leave out the first samples of another sampler; only their indices are drawn.

    Args:
        sampler: The order.
        offset: How many samples to leave out.

    Example:
        >>> list(OffsetSampler(range(5), offset=3))
        [3, 4]
    """

    def __init__(self, sampler: Any, *, offset: int) -> None:
        self.sampler = sampler
        self._offset = offset

    def __iter__(self) -> Iterator[Any]:
        return islice(self.sampler, self._offset, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self._offset)


class OffsetStream(StreamWrapper):
    """Leave out the first samples of a stream, which are read and dropped.

    Args:
        dataset: The stream.
        offset: How many samples to leave out.
    """

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

    Returns:
        The number; None where batches may differ in size, or come from several workers that read a part of a stream
        each, so that their samples have no order that does not depend on the batch size.

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


def has_own_shares(loader: Any) -> bool:
    """Tell whether a loader's data gives each rank its share in a way of its own, unknown for other numbers of ranks.

    What hftrain and torch's `DistributedSampler` share out is known: each round takes the next samples of one order.
    """
    if isinstance(loader, DispatchLoader) or not is_plain_loader(loader):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return is_rank_aware(_innermost(loader.dataset))
    sampler = _innermost(_batches_of(loader))
    return is_rank_aware(sampler) and not isinstance(sampler, DistributedSampler)


def with_offset(loader: Any, offset: int) -> Any:
    """Return a loader whose batches are cut from a sample of the epoch on.

    Args:
        loader: This rank's loader.
        offset: Samples, of all ranks together, that come before.

    Raises:
        CheckpointError: The loader does not say in which order all ranks read.
    """
    if isinstance(loader, DispatchLoader):
        return loader.with_loader(with_offset(loader.loader, offset))
    if not is_plain_loader(loader):
        raise _cannot_begin(f"a {type(loader).__name__}, which iterates in its own way", offset)
    # The one-off loader's workers must end with the epoch.
    options: dict[str, Any] = {"persistent_workers": False}
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return rebuild_loader(loader, dataset=_shifted(loader.dataset, offset), **options)
    if loader.batch_sampler is None:
        return rebuild_loader(loader, sampler=_shifted(loader.sampler, offset), batch_size=None, **options)
    return rebuild_loader(loader, batch_sampler=_shifted(loader.batch_sampler, offset), **options)


def _batches_of(loader: Any) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _shifted(part: Any, offset: int) -> Any:
    """Copy a chain of samplers or streams with the offset under all that batches and shares out."""
    if _is_wrapper(part) or type(part) is BatchSampler:
        changed = copy.copy(part)
        setattr(changed, _name_inside(part), _shifted(_inside(part), offset))
        return changed
    if is_rank_aware(part) or isinstance(part, BatchSampler):
        raise _cannot_begin(f"a {type(part).__name__}, which makes batches or shares of its own", offset)
    kind = OffsetStream if isinstance(part, IterableDataset) else OffsetSampler
    return kind(part, offset=offset)


def _is_wrapper(part: Any) -> bool:
    """Recognise what hftrain itself puts around batches or streams; accelerate's parts by name, to import nothing."""
    known = (RankBatches, SeededBatches, SkippedBatches, EvenedSampler, EvenedStream, BatchShardStream)
    return isinstance(part, known) or type(part).__name__ in ("BatchSamplerShard", "IterableDatasetShard")


def _name_inside(part: Any) -> str:
    return next(name for name in ("batch_sampler", "sampler", "dataset") if hasattr(part, name))


def _inside(part: Any) -> Any:
    return getattr(part, _name_inside(part))


def _innermost(part: Any) -> Any:
    while _is_wrapper(part) or type(part) is BatchSampler:
        part = _inside(part)
    return part


def _cannot_begin(what: str, offset: int) -> CheckpointError:
    return CheckpointError(
        "A run was resumed with another batch size or number of processes.",
        f"It stands {offset} samples into a batch of the new size, and its data comes from {what}.",
        "Resume with the batch size and number of processes of the checkpoint, or from an epoch's end.",
    )
