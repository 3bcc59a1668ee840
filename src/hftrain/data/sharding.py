"""How data is sharded over ranks: one plan for the loaders of a Trainer, an Engine and users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.data.dispatch import DispatchLoader
from hftrain.data.samplers import (
    ContiguousShard,
    EvenedSampler,
    RankBatches,
    give_generator,
    is_rank_aware,
    samplers_of,
)
from hftrain.data.streams import BatchShardStream, EpochStream, EvenedStream, splits_among_workers
from hftrain.data.whole_batches import as_it_is, whole_batches

_COPIED = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class RankLoader(DataLoader[Any]):
    """A `DataLoader` that already yields its rank's share; reads whole batches if `whole_batches` can."""

    def _get_iterator(self) -> Any:
        # torch's `__iter__` calls this; without the call, rows are read, with the same result.
        whole = None if self.batch_sampler is None else whole_batches(self.dataset, self.collate_fn)
        if whole is None:
            return super()._get_iterator()
        options = {"dataset": whole, "collate_fn": as_it_is, "batch_sampler": self.batch_sampler}
        return rebuild_loader(self, kind=DataLoader, **options)._get_iterator()


def is_plain_loader(loader: Any) -> bool:
    """Return whether a loader is a plain torch loader that can be rebuilt without losing behaviour.

    Accelerate's loaders pass `isinstance(..., DataLoader)`, so the exact type is checked.
    """
    return issubclass(type(loader), DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def rebuild_loader(loader: Any, *, kind: type[DataLoader[Any]] = RankLoader, **changes: Any) -> Any:
    """Rebuild a loader with some arguments changed; batching is not copied and must be among them."""
    options = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    return kind(**{**options, **changes})


def on_reader(loader: Any, change: Callable[[Any], Any]) -> Any:
    """Change a loader; for one that dispatches, change the loader that it reads with."""
    if not isinstance(loader, DispatchLoader):
        return change(loader)
    inner = change(loader.loader)
    return loader if inner is loader.loader else loader.with_loader(inner)


def end_workers(loader: Any) -> None:
    """End the persistent workers of a torch loader, even if the loader is still referenced."""
    loader = getattr(loader, "loader", loader)
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """The share of the data that a rank reads.

    Shares for training have equal lengths. Shares for evaluation are disjoint and complete: a contiguous part
    of map-style data for each rank, in order; batch i of a stream belongs to rank `i % world_size`.

    Args:
        seed: Seeds unseeded orders, so that all ranks use the same order.
        even_batches: In training, fill up the last round from the start, so that all ranks get equally many batches.
        split_batches: Whether the batch size is the total over all ranks; not for `share` in training.
        dispatch_batches: Whether the main process reads for all ranks; None for streams only.
    """

    rank: int = 0
    world_size: int = 1
    is_training: bool = True
    seed: int = 42
    even_batches: bool = True
    split_batches: bool = False
    dispatch_batches: bool | None = None

    def size_of(self, batch_size: int) -> int:
        """Return the batch size of one rank.

        Raises:
            ConfigError: `split_batches` is set and the size is not divisible by the number of ranks.
        """
        if not self.split_batches:
            return batch_size
        if batch_size % self.world_size:
            raise ConfigError(
                "Cannot use split_batches=True.",
                f"A batch of {batch_size} cannot be split into {self.world_size} equal parts.",
                "Make the batch size a multiple of the number of processes.",
                batch_size=batch_size,
                world_size=self.world_size,
            )
        return batch_size // self.world_size

    def dispatches(self, dataset: Any) -> bool:
        """Return whether the main process reads for all ranks: as set, else for streams in a process group."""
        if self.world_size == 1 or self.dispatch_batches is not None:
            return self.world_size > 1 and bool(self.dispatch_batches)
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        return has_group and isinstance(dataset, IterableDataset)

    def own(self, loader: Any) -> Any:
        """Return what a rank reads of a loader that a hook returned, which is its own as it is.

        For a loader from `Accelerator.prepare`, return the torch loader inside, which can be resumed exactly: to
        train with accelerate's share of the data, to evaluate with hftrain's, which repeats no sample.
        """
        shared, whole = _unprepared(loader)
        if not self.is_training and whole is not loader:
            return self.split(whole)
        if shared is loader or not is_plain_loader(shared):
            return shared
        batching = ("batch_sampler",) if shared.batch_sampler is not None else ("sampler", "batch_size")
        if isinstance(shared.dataset, IterableDataset):
            batching = ("batch_size", "drop_last")
        # As hftrain's own, which is read one batch ahead, as accelerate does.
        return rebuild_loader(shared, **{name: getattr(shared, name) for name in batching})

    def share(self, loader: Any) -> Any:
        """Give one rank its share of a loader that is the same on all ranks.

        Loaders that are already sharded are returned unchanged: hftrain's own, those with a `DistributedSampler` or its
        like, and classes other than torch's `DataLoader`. Those from `Accelerator.prepare`: see `own`. Random samplers
        without a generator get one; mutates them.

        Raises:
            ConfigError: The loader cannot be split.
        """
        own = self.own(loader)
        is_whole = own is loader and not isinstance(loader, RankLoader) and issubclass(type(loader), DataLoader)
        return self.split(loader) if is_whole else own

    def split(self, loader: Any) -> Any:
        """Shard a torch loader that is not sharded yet; see `share`."""
        if self.world_size == 1 or any(is_rank_aware(part) for part in (loader.dataset, *samplers_of(loader))):
            return loader
        if not is_plain_loader(loader):
            raise _cannot_split(loader, "it iterates in its own way, which a new loader would lose.")
        give_generator(loader, seed=self.seed)
        if self.dispatches(loader.dataset):
            return self._dispatched(loader)
        if isinstance(loader.dataset, IterableDataset):
            size = None if loader.batch_size is None else self.size_of(loader.batch_size)
            stream = self._stream_share(loader, size or 1)
            return rebuild_loader(loader, dataset=stream, batch_size=size, drop_last=loader.drop_last)
        return rebuild_loader(loader, **(self._training_share if self.is_training else self._evaluation_share)(loader))

    def _stream_share(self, loader: Any, size: int) -> Any:
        """Shard a stream, which every rank reads completely."""
        dataset, drops_rest = loader.dataset, False
        if self.is_training:
            dataset = EpochStream(dataset, seed=self.seed, rank=self.rank)
            drops_rest = self.even_batches and loader.drop_last
            if self.even_batches and not drops_rest:
                dataset = EvenedStream(dataset, unit=size * self.world_size)
        elif loader.num_workers > 1 and not splits_among_workers(dataset):
            raise ConfigError(
                f"Cannot evaluate {type(dataset).__name__} in several processes with several workers each.",
                "Each worker might yield the whole stream, which would count samples twice.",
                "Use one worker or none (dataloader_num_workers=1), or a map-style dataset.",
                num_workers=loader.num_workers,
                world_size=self.world_size,
            )
        return BatchShardStream(
            dataset, batch_size=size, rank=self.rank, world_size=self.world_size, drops_rest=drops_rest
        )

    def _training_share(self, loader: Any) -> dict[str, Any]:
        is_batched = loader.batch_sampler is not None
        batches = loader.batch_sampler if is_batched else loader.sampler
        if not is_batched and not isinstance(batches, BatchSampler):
            raise _cannot_split(loader, "batch_size=None leaves no batches to distribute.")
        place = {"num_processes": self.world_size, "process_index": self.rank}
        share = RankBatches(batches, **place, even_batches=self.even_batches)
        return {"batch_sampler": share} if is_batched else {"sampler": share, "batch_size": None}

    def _evaluation_share(self, loader: Any) -> dict[str, Any]:
        batches, place = loader.batch_sampler, {"rank": self.rank, "world_size": self.world_size}
        if batches is None:
            return {"sampler": ContiguousShard(loader.sampler, **place), "batch_size": None}
        if type(batches) is not BatchSampler:
            return {"batch_sampler": ContiguousShard(batches, **place)}
        size = self.size_of(batches.batch_size)
        sampler = ContiguousShard(batches.sampler, unit=size if batches.drop_last else 1, **place)
        return {"sampler": sampler, "batch_size": size, "drop_last": batches.drop_last}

    def _dispatched(self, loader: Any) -> DispatchLoader:
        """Make the main process read for all ranks, as if there were one rank."""
        batches, dataset, size = loader.batch_sampler, loader.dataset, loader.batch_size
        is_stream = isinstance(dataset, IterableDataset)
        is_plain = not is_stream and type(batches) is BatchSampler
        if size is not None:
            size = self.size_of(size)
        elif self.split_batches:
            raise _cannot_split(loader, "split_batches=True needs a batch size.")
        unit = self.world_size * (size or 1 if is_stream or is_plain else 1)
        evens_out = self.is_training and self.even_batches and not loader.drop_last
        order = loader.sampler if is_plain or batches is None else batches
        if is_stream and self.is_training:
            dataset = EpochStream(dataset, seed=self.seed, rank=0)  # the innermost dataset, which needs the epoch
        if evens_out and is_stream:
            dataset = EvenedStream(dataset, unit=unit)
        elif evens_out:
            order = EvenedSampler(order, unit=unit)
        if is_stream or is_plain:
            batching = {"batch_size": size, "drop_last": loader.drop_last, **({"sampler": order} if is_plain else {})}
        else:
            batching = {"sampler": order, "batch_size": None} if batches is None else {"batch_sampler": order}
        return DispatchLoader(
            rebuild_loader(loader, dataset=dataset, **batching),
            rank=self.rank,
            world_size=self.world_size,
            drops_rest=self.is_training and loader.drop_last,
        )


def _unprepared(loader: Any) -> tuple[Any, Any]:
    """Return the torch loaders inside an accelerate loader: for this rank's share, and for the whole data.

    Both are the loader itself if it has none inside or does more than shard. Recognised by name, to import nothing.
    """
    loader = loader.dataloader if type(loader).__name__ == "MpDeviceLoaderWrapper" else loader
    kind = type(loader)
    if not kind.__module__.startswith("accelerate.") or getattr(loader, "skip_batches", None) != 0:
        return loader, loader
    base: Any = loader.base_dataloader
    if kind.__name__ == "DataLoaderDispatcher":
        return loader if loader.state.num_processes > 1 else base, base
    is_batched = base.batch_sampler is not None
    part: Any = base.dataset if isinstance(base.dataset, IterableDataset) else base.batch_sampler or base.sampler
    if type(part).__name__ == "IterableDatasetShard":
        changes = {"dataset": part.dataset, "batch_size": part.batch_size, "drop_last": base.drop_last}
        return base, rebuild_loader(base, kind=DataLoader, **changes)
    if type(part).__name__ == "BatchSamplerShard":
        batches = part.batch_sampler
        changes = {"batch_sampler": batches} if is_batched else {"sampler": batches, "batch_size": None}
        return base, rebuild_loader(base, kind=DataLoader, **changes)
    if isinstance(part, IterableDataset):  # the dataset may already be sharded, which cannot be found out
        return base, rebuild_loader(base, batch_size=base.batch_size, drop_last=base.drop_last)
    return base, base


def _cannot_split(loader: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"Cannot split {type(loader).__name__} among several processes.",
        f"It cannot be: {reason}",
        "Give it a torch.utils.data.DistributedSampler, or return a torch DataLoader with a batch size.",
    )
