"""Loaders made again with a few changes: each rank's share, or without the first batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.data.dispatch import DispatchLoader, dispatch, dispatches
from hftrain.data.samplers import ContiguousShard, give_generator, is_rank_aware, samplers_of
from hftrain.data.streams import EpochStream, shard_stream

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
    """A `DataLoader` that already yields the share of its rank."""


def is_plain_loader(loader: Any) -> bool:
    """Tell whether a loader is torch's own kind and can be made again without losing behaviour.

    Accelerate's loaders only pretend to be `DataLoader` objects, hence the look at the real type.
    """
    return issubclass(type(loader), DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def rebuild_loader(loader: Any, *, kind: type[DataLoader[Any]] = RankLoader, **changes: Any) -> Any:
    """Make a loader again with some arguments changed; batching is not copied and has to be among them."""
    options = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    return kind(**{**options, **changes})


def shard_batches(batch_sampler: Any, *, rank: int, world_size: int, even_batches: bool, split_batches: bool) -> Any:
    """Give one rank its share of the training batches; with `even_batches` all ranks get as many, and full ones."""
    from accelerate.data_loader import BatchSamplerShard

    return BatchSamplerShard(
        batch_sampler,
        num_processes=world_size,
        process_index=rank,
        split_batches=split_batches,
        even_batches=even_batches,
    )


def split_size(batch_size: int, *, world_size: int, split_batches: bool) -> int:
    """Return the batch size of one rank.

    Raises:
        ConfigError: With `split_batches`, a size that cannot be divided among the ranks.
    """
    if not split_batches:
        return batch_size
    if batch_size % world_size:
        raise ConfigError(
            "split_batches=True was asked for.",
            f"A batch of {batch_size} cannot be split into {world_size} equal parts.",
            "Make the batch size a multiple of the number of processes.",
            batch_size=batch_size,
            world_size=world_size,
        )
    return batch_size // world_size


def shard_loader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    is_training: bool,
    even_batches: bool = True,
    split_batches: bool = False,
    seed: int = 42,
    dispatch_batches: bool | None = None,
) -> Any:
    """Give one rank its share of a plain loader, such as one that a user's override returned.

    Loaders that are sharded already come back as they are: hftrain's own, those with a `DistributedSampler` or its
    like, and what is not a torch `DataLoader`. One that `Accelerator.prepare` returned comes back as the torch loader
    inside, which a run can resume exactly: to train with accelerate's share of the data, to evaluate with hftrain's,
    which repeats no sample.

    Args:
        loader: The loader, the same on all ranks.
        rank: This rank.
        world_size: The number of ranks.
        is_training: Training shares have equal lengths; evaluation shares are disjoint and complete.
        even_batches: In training, fill the last round up from the start instead of leaving ranks without a batch.
        split_batches: The loader's batch size is that of all ranks together.
        seed: Seeds random samplers that have no generator, so that all ranks agree on the order; mutates them.
        dispatch_batches: Whether the main process reads for all ranks; None for streams only.

    Returns:
        The loader itself, or a new one over the same dataset.

    Raises:
        ConfigError: The loader cannot be split.
    """
    shared, whole = _unprepared(loader)
    if is_training and shared is not loader:
        return shared
    loader = loader if is_training else whole
    if world_size == 1 or _is_sharded(loader):
        return loader
    if not is_plain_loader(loader):
        raise _cannot_split(loader, "it iterates in its own way, which a new loader would lose.")
    give_generator(loader, seed=seed)
    if dispatches(dispatch_batches, loader.dataset):
        return _dispatch(
            loader,
            rank=rank,
            world_size=world_size,
            is_training=is_training,
            even_batches=even_batches,
            split_batches=split_batches,
            seed=seed,
        )
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size
        if size is not None:
            size = split_size(size, world_size=world_size, split_batches=split_batches)
        stream = shard_stream(
            loader.dataset,
            batch_size=size or 1,
            drop_last=loader.drop_last,
            rank=rank,
            world_size=world_size,
            is_training=is_training,
            even_batches=even_batches,
            num_workers=loader.num_workers,
            seed=seed,
        )
        return rebuild_loader(loader, dataset=stream, batch_size=size, drop_last=loader.drop_last)
    if is_training:
        batching = _training_share(
            loader, rank=rank, world_size=world_size, even_batches=even_batches, split_batches=split_batches
        )
    else:
        batching = _evaluation_share(loader, rank=rank, world_size=world_size, split_batches=split_batches)
    return rebuild_loader(loader, **batching)


def _dispatch(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    is_training: bool,
    even_batches: bool,
    split_batches: bool,
    seed: int,
) -> DispatchLoader:
    batches, dataset, size = loader.batch_sampler, loader.dataset, loader.batch_size
    is_stream = isinstance(dataset, IterableDataset)
    is_plain = not is_stream and type(batches) is BatchSampler
    if size is not None:
        size = split_size(size, world_size=world_size, split_batches=split_batches)
    elif split_batches:
        raise _cannot_split(loader, "split_batches=True needs a batch size.")
    if is_stream and is_training:
        dataset = EpochStream(dataset, seed=seed, rank=0)

    def build(dataset: Any, sampler: Any) -> Any:
        if is_stream or is_plain:
            batching = {"batch_size": size, "drop_last": loader.drop_last, **({"sampler": sampler} if is_plain else {})}
        else:
            batching = {"sampler": sampler, "batch_size": None} if batches is None else {"batch_sampler": sampler}
        return rebuild_loader(loader, dataset=dataset, **batching)

    return dispatch(
        build,
        dataset=dataset,
        sampler=loader.sampler if is_plain or batches is None else batches,
        batch_size=size or 1 if is_stream or is_plain else 1,
        rank=rank,
        world_size=world_size,
        evens_out=is_training and even_batches and not loader.drop_last,
        drops_rest=is_training and loader.drop_last,
    )


def _training_share(
    loader: Any, *, rank: int, world_size: int, even_batches: bool, split_batches: bool
) -> dict[str, Any]:
    is_batched = loader.batch_sampler is not None
    batches = loader.batch_sampler if is_batched else loader.sampler
    if not is_batched and not isinstance(batches, BatchSampler):
        raise _cannot_split(loader, "batch_size=None leaves no batches to hand out.")
    size = getattr(batches, "batch_size", None)
    if size is not None:
        split_size(size, world_size=world_size, split_batches=split_batches)
    elif split_batches:
        raise _cannot_split(loader, "split_batches=True needs a batch sampler with a batch_size.")
    share = shard_batches(
        batches, rank=rank, world_size=world_size, even_batches=even_batches, split_batches=split_batches
    )
    return {"batch_sampler": share} if is_batched else {"sampler": share, "batch_size": None}


def _evaluation_share(loader: Any, *, rank: int, world_size: int, split_batches: bool) -> dict[str, Any]:
    batches = loader.batch_sampler
    if batches is None:
        return {"sampler": ContiguousShard(loader.sampler, rank=rank, world_size=world_size), "batch_size": None}
    if type(batches) is not BatchSampler:
        return {"batch_sampler": ContiguousShard(batches, rank=rank, world_size=world_size)}
    size = split_size(batches.batch_size, world_size=world_size, split_batches=split_batches)
    unit = size if batches.drop_last else 1
    sampler = ContiguousShard(batches.sampler, rank=rank, world_size=world_size, unit=unit)
    return {"sampler": sampler, "batch_size": size, "drop_last": batches.drop_last}


def _unprepared(loader: Any) -> tuple[Any, Any]:
    """Return the torch loaders inside one of accelerate's: of this rank's share, and of the whole data.

    Without any inside, or where it does more than share out, that is the loader itself. Told by name, to import none.
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
    if isinstance(part, IterableDataset):  # the dataset itself may have given its share, and cannot be asked
        return base, rebuild_loader(base, batch_size=base.batch_size, drop_last=base.drop_last)
    return base, base


def _is_sharded(loader: Any) -> bool:
    if isinstance(loader, RankLoader) or not issubclass(type(loader), DataLoader):
        return True
    return any(is_rank_aware(part) for part in (loader.dataset, *samplers_of(loader)))


def _cannot_split(loader: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"A {type(loader).__name__} was to be split among several processes.",
        f"It cannot be: {reason}",
        "Give it a torch.utils.data.DistributedSampler, or return a torch DataLoader with a batch size.",
    )
