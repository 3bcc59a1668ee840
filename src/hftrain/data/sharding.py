"""How data is sharded over ranks: one plan for the loaders of a Trainer, an Engine and users."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.extras import extra
from hftrain.data.datasets import splits_among_workers
from hftrain.data.samplers import (
    ContiguousShard,
    EvenedSampler,
    RankBatches,
    give_generator,
    is_rank_aware,
    own_order,
    samplers_of,
)

_COPIED_OPTIONS = (
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
    """A `DataLoader` that already yields its rank's share."""


def is_plain_loader(loader: Any) -> bool:
    """Return whether a loader is a plain torch loader that can be rebuilt without losing behaviour.

    Accelerate's loaders pass `isinstance(..., DataLoader)`, so the exact type is checked.
    """
    return issubclass(type(loader), DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def rebuild_loader(loader: Any, *, kind: type[DataLoader[Any]] = RankLoader, order: Any = None, **changes: Any) -> Any:
    """Rebuild a loader with some arguments changed.

    Args:
        order: Replaces the batch sampler, or the sampler of a loader without batches.
        changes: Arguments of torch's `DataLoader`. For map-style data, a `batch_size` comes with its `sampler`.
    """
    options = {name: getattr(loader, name) for name in _COPIED_OPTIONS if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        options |= {"sampler": loader.sampler if order is None else order, "batch_size": None}
    elif "batch_size" not in changes:
        options["batch_sampler"] = loader.batch_sampler if order is None else order
    return kind(**{**options, **changes})


def on_reader(loader: Any, change: Callable[[Any], Any]) -> Any:
    """Change a loader; for one that dispatches, change the loader that it reads with."""
    if not isinstance(loader, DispatchLoader):
        return change(loader)
    reader = change(loader.loader)
    return loader if reader is loader.loader else loader.with_loader(reader)


def batches_of(loader: Any) -> Any:
    """Return a loader's batch sampler, or the sampler of one without batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


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
        ranks: Has the `group` in which batches are sent; None sends them among all processes.
    """

    rank: int = 0
    world_size: int = 1
    is_training: bool = True
    seed: int = 42
    even_batches: bool = True
    split_batches: bool = False
    dispatch_batches: bool | None = None
    ranks: Any = field(default=None, compare=False, repr=False)

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
        rank_loader, full_loader = _unwrap_prepared(loader)
        if not self.is_training and full_loader is not loader:
            return self.split(full_loader)
        if rank_loader is loader or not is_plain_loader(rank_loader):
            return rank_loader
        # As hftrain's own, which is read one batch ahead, as accelerate does.
        return rebuild_loader(rank_loader)

    def share(self, loader: Any) -> Any:
        """Give one rank its share of a loader that is the same on all ranks.

        Loaders that are already sharded are returned unchanged: hftrain's own, those with a `DistributedSampler` or its
        like, and classes other than torch's `DataLoader`. Those from `Accelerator.prepare`: see `own`. Random samplers
        without a generator get one; mutates them.
        """
        rank_loader = self.own(loader)
        is_whole = rank_loader is loader and not isinstance(loader, RankLoader) and issubclass(type(loader), DataLoader)
        return self.split(loader) if is_whole else rank_loader

    def split(self, loader: Any) -> Any:
        """Shard a torch loader that is not sharded yet; see `share`."""
        if self.world_size == 1 or any(is_rank_aware(part) for part in (loader.dataset, *samplers_of(loader))):
            return loader
        if not is_plain_loader(loader):
            raise _cannot_split(loader, "it iterates in its own way, which a new loader would lose.")
        give_generator(loader, seed=self.seed)
        if self.dispatches(loader.dataset):
            return self._dispatch_loader(loader)
        if isinstance(loader.dataset, IterableDataset):
            size = None if loader.batch_size is None else self.size_of(loader.batch_size)
            return rebuild_loader(loader, dataset=self._stream_share(loader, size or 1), batch_size=size)
        return rebuild_loader(loader, **(self._training_share if self.is_training else self._evaluation_share)(loader))

    def _stream_share(self, loader: Any, size: int) -> Any:
        dataset, drops_rest, streams = loader.dataset, False, extra("streams")
        if self.is_training:
            dataset = streams.EpochStream(dataset, seed=self.seed, rank=self.rank)
            drops_rest = self.even_batches and loader.drop_last
            if self.even_batches and not drops_rest:
                dataset = streams.EvenedStream(dataset, unit=size * self.world_size)
        elif loader.num_workers > 1 and not splits_among_workers(dataset):
            raise ConfigError(
                f"Cannot evaluate {type(dataset).__name__} in several processes with several workers each.",
                "Each worker might yield the whole stream, which would count samples twice.",
                "Use one worker or none (dataloader_num_workers=1), or a map-style dataset.",
                num_workers=loader.num_workers,
                world_size=self.world_size,
            )
        return streams.BatchShardStream(
            dataset, batch_size=size, rank=self.rank, world_size=self.world_size, drops_rest=drops_rest
        )

    def _training_share(self, loader: Any) -> dict[str, Any]:
        batches = batches_of(loader)
        if loader.batch_sampler is None and not isinstance(batches, BatchSampler):
            raise _cannot_split(loader, "batch_size=None leaves no batches to distribute.")
        ranks = {"num_processes": self.world_size, "process_index": self.rank}
        batches = own_order(batches, seed=self.seed)
        return {"order": RankBatches(batches, **ranks, even_batches=self.even_batches)}

    def _evaluation_share(self, loader: Any) -> dict[str, Any]:
        batches, ranks = loader.batch_sampler, {"rank": self.rank, "world_size": self.world_size}
        is_plain = type(batches) is BatchSampler
        order = own_order(loader.sampler if is_plain or batches is None else batches, seed=self.seed)
        if not is_plain:
            return {"order": ContiguousShard(order, **ranks)}
        size = self.size_of(batches.batch_size)
        sampler = ContiguousShard(order, unit=size if batches.drop_last else 1, **ranks)
        return {"sampler": sampler, "batch_size": size, "drop_last": batches.drop_last}

    def _dispatch_loader(self, loader: Any) -> DispatchLoader:
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
            # The innermost dataset, which needs the epoch.
            dataset = extra("streams").EpochStream(dataset, seed=self.seed, rank=0)
        if evens_out and is_stream:
            dataset = extra("streams").EvenedStream(dataset, unit=unit)
        elif evens_out:
            order = EvenedSampler(order, unit=unit)
        if is_plain:
            batching = {"sampler": order, "batch_size": size, "drop_last": loader.drop_last}
        else:
            batching = {"batch_size": size} if is_stream else {"order": order}
        return DispatchLoader(
            rebuild_loader(loader, dataset=dataset, **batching),
            rank=self.rank,
            world_size=self.world_size,
            drops_rest=self.is_training and loader.drop_last,
            ranks=self.ranks,
        )


def _unwrap_prepared(loader: Any) -> tuple[Any, Any]:
    """Return the torch loaders inside an accelerate loader: for this rank's share, and for the whole data.

    Both are the loader itself if it has none inside or does more than shard. Recognised by name, to import nothing.
    """
    loader = loader.dataloader if type(loader).__name__ == "MpDeviceLoaderWrapper" else loader
    loader_class = type(loader)
    if not loader_class.__module__.startswith("accelerate.") or getattr(loader, "skip_batches", None) != 0:
        return loader, loader
    base: Any = loader.base_dataloader
    if loader_class.__name__ == "DataLoaderDispatcher":
        return loader if loader.state.num_processes > 1 else base, base
    part: Any = base.dataset if isinstance(base.dataset, IterableDataset) else base.batch_sampler or base.sampler
    if type(part).__name__ == "IterableDatasetShard":
        return base, rebuild_loader(base, kind=DataLoader, dataset=part.dataset, batch_size=part.batch_size)
    if type(part).__name__ == "BatchSamplerShard":
        return base, rebuild_loader(base, kind=DataLoader, order=part.batch_sampler)
    if isinstance(part, IterableDataset):  # the dataset may already be sharded, which cannot be found out
        return base, rebuild_loader(base)
    return base, base


def _cannot_split(loader: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"Cannot split {type(loader).__name__} among several processes.",
        f"It cannot be: {reason}",
        "Give it a torch.utils.data.DistributedSampler, or return a torch DataLoader with a batch size.",
    )


# What a rank receives in each round: its batch, if any; whether this was the last round; the error, if any.
Parcel = tuple[list[Any], bool, str | None]


def takes_turns(loader: Any) -> bool:
    """Return whether ranks read batches in turn (rank r of W reads r, r + W, ...), not contiguous shares."""
    return isinstance(loader, DispatchLoader) or isinstance(getattr(loader, "dataset", None), IterableDataset)


class DispatchLoader:
    """Give rank r the batches r, r + W, ... of a loader that only the main process iterates.

    Reading a batch is collective: a round of batches, one for each rank, is sent when it is read. Batches may hold
    anything that can be pickled, and differ in shape. `drops_rest` drops a last round without a batch for every
    rank. Other attributes are those of the loader.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int, drops_rest: bool, ranks: Any = None) -> None:
        self.loader = loader
        self.ranks = ranks
        self.rank = rank
        self.world_size = world_size
        self.drops_rest = drops_rest

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        rounds, num_left = divmod(len(self.loader), self.world_size)
        return rounds + (self.rank < num_left and not self.drops_rest)

    def __iter__(self) -> Iterator[Any]:
        # Started now, not at the first batch: the random state for the epoch's order is set at this point.
        return self._receive(iter(self.loader) if self.rank == 0 else iter(()))

    def with_loader(self, loader: Any) -> DispatchLoader:
        """Return a copy with another loader."""
        place = {"rank": self.rank, "world_size": self.world_size, "ranks": self.ranks}
        return DispatchLoader(loader, **place, drops_rest=self.drops_rest)

    def _receive(self, batches: Iterator[Any]) -> Iterator[Any]:
        is_last = False
        while not is_last:
            if self.rank == 0:
                batch, is_last = self._send_round(batches)
            else:
                parcel = self._scatter(None)
                batch, is_last = parcel[:2]
                if parcel[2] is not None:
                    problem, reason = "The main process was to read a batch for this one.", f"It failed: {parcel[2]}"
                    raise TaskError(problem, reason, "See the main process's error.")
            yield from batch

    def _send_round(self, batches: Iterator[Any]) -> tuple[list[Any], bool]:
        try:
            shares = list(islice(batches, self.world_size))
        except Exception as error:
            self._scatter([([], True, f"{type(error).__name__}: {error}")] * self.world_size)
            raise
        is_last = len(shares) < self.world_size
        if is_last and self.drops_rest:
            shares = []
        parcels: list[Parcel] = [(shares[rank : rank + 1], is_last, None) for rank in range(1, self.world_size)]
        self._scatter([([], is_last, None), *parcels])
        return shares[:1], is_last

    def _scatter(self, parcels: list[Parcel] | None) -> Parcel:
        """Send each rank its parcel from the main process. Collective."""
        received: list[Any] = [None]
        group = None if self.ranks is None else self.ranks.group
        torch.distributed.scatter_object_list(received, parcels, group=group, group_src=0)
        return received[0]  # type: ignore[no-any-return]
