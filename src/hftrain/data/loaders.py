"""Datasets become the loaders of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.data.dispatch import DispatchLoader, dispatch, dispatches
from hftrain.data.samplers import (
    ContiguousShard,
    EpochShuffleSampler,
    GlobalShuffleSampler,
    give_generator,
    is_rank_aware,
    samplers_of,
)
from hftrain.data.seeding import SeededBatches, new_generator, start_worker
from hftrain.data.sharding import RankLoader, shard_batches, split_size
from hftrain.data.sizes import has_length
from hftrain.data.streams import EpochStream, shard_stream, splits_among_workers
from hftrain.data.wrappers import StreamWrapper

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How datasets are read.

    Args:
        batch_size: Samples per batch of one rank, or of all ranks together with `split_batches`.
        drop_last: Leave out the last batch if it is not full.
        num_workers: Processes that load; 0 loads in this one.
        pin_memory: Put batches in page-locked memory.
        persistent_workers: Keep the workers between epochs.
        prefetch_factor: Batches that each worker loads ahead; None for torch's own choice.
        multiprocessing_context: How workers start; None for Python's own choice.
        seed: Seeds the training order and the workers.
        shuffle: Whether training reads in random order; streams have their own.
        split_batches: Whether `batch_size` is shared among the ranks.
        even_batches: In training, fill the last round of batches up from the start, so that no rank runs short.
        use_seedable_sampler: Whether the order depends on `seed` and the epoch alone; else torch's global generator
            decides, and a resume in the middle of an epoch cannot find the order again.
        dispatch_batches: Whether the main process reads for all ranks; None for streams only.

    Raises:
        ConfigError: A number is out of range, or a worker option is given without workers.
    """

    batch_size: int
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: str | None = None
    seed: int = 42
    shuffle: bool = True
    split_batches: bool = False
    even_batches: bool = True
    use_seedable_sampler: bool = True
    dispatch_batches: bool | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_workers < 0:
            raise ConfigError(
                "A loader was configured.",
                "A batch needs at least one sample, and workers cannot be fewer than none.",
                "Correct the number.",
                batch_size=self.batch_size,
                num_workers=self.num_workers,
            )
        if self.num_workers == 0 and (self.persistent_workers or self.prefetch_factor is not None):
            raise ConfigError(
                "Options for loader workers were given.",
                "There are no workers: batches are loaded in the main process.",
                "Set dataloader_num_workers to 1 or more, or leave the options out.",
                num_workers=self.num_workers,
                persistent_workers=self.persistent_workers,
                prefetch_factor=self.prefetch_factor,
            )


def build_train_loader(
    dataset: Any,
    config: LoaderConfig,
    *,
    collate: Collate,
    sampler: Any = None,
    rank: int = 0,
    world_size: int = 1,
) -> RankLoader | DispatchLoader:
    """Build this rank's training loader.

    Args:
        dataset: A map-style dataset or an `IterableDataset`.
        config: How to read it.
        collate: Makes a batch of a list of samples.
        sampler: Another order than `config` asks for, the same on all ranks; one that is made for several ranks, such
            as torch's `DistributedSampler`, is not split again. Not for streams.
        rank: This rank.
        world_size: The number of ranks; their shares have equal lengths with `even_batches`.

    Returns:
        The loader; making an iterator of it leaves torch's global generator alone.

    Raises:
        ConfigError: No batch would come out, or the dataset, sampler and settings do not fit together.
    """
    _check_dataset(dataset, sampler)
    is_shared = isinstance(dataset, IterableDataset) and is_rank_aware(dataset)
    if world_size > 1 and not is_shared and dispatches(config.dispatch_batches, dataset):
        return _dispatch(
            dataset, config, collate=collate, sampler=sampler, rank=rank, world_size=world_size, is_training=True
        )
    size = split_size(config.batch_size, world_size=world_size, split_batches=config.split_batches)
    options = _options(config, collate=collate, rank=rank, seed=None)
    if isinstance(dataset, IterableDataset):
        if world_size > 1 and not is_shared:
            dataset = _shard(dataset, config, size=size, rank=rank, world_size=world_size, is_training=True)
        elif config.persistent_workers and not isinstance(dataset, StreamWrapper):
            # `_dispatch` has wrapped it already; a second one would put a filled stream back to before its start.
            dataset = EpochStream(dataset, seed=config.seed, rank=rank)
        return RankLoader(dataset, batch_size=size, drop_last=config.drop_last, **options)
    if config.persistent_workers and hasattr(dataset, "set_epoch"):
        raise ConfigError(
            f"Persistent workers were asked for with a {type(dataset).__name__}.",
            "Its set_epoch would never reach the copies in workers that outlive an epoch.",
            "Set dataloader_persistent_workers=False.",
            persistent_workers=True,
        )
    if sampler is None:
        sampler = _train_sampler(dataset, config, world_size=world_size)
    give_generator(sampler, seed=config.seed)
    batches: Any = BatchSampler(sampler, size, config.drop_last)
    if world_size > 1 and not _is_rank_aware(sampler):
        batches = shard_batches(
            batches, rank=rank, world_size=world_size, even_batches=config.even_batches, split_batches=False
        )
    _check_length(batches, config, world_size=world_size)
    return _map_loader(dataset, batches, config, rank=rank, options=options)


def build_eval_loader(
    dataset: Any,
    config: LoaderConfig,
    *,
    collate: Collate,
    sampler: Any = None,
    rank: int = 0,
    world_size: int = 1,
) -> RankLoader | DispatchLoader:
    """Build this rank's loader for evaluation or prediction: each sample is read once, on one rank.

    The ranks' shares of a map-style dataset, one after the other, are the dataset in order. Of a stream, batch i
    belongs to rank `i % world_size`. Nothing is padded or repeated; a rank may get less than another, or nothing.

    Args:
        dataset: A map-style dataset or an `IterableDataset`.
        config: How to read it; `shuffle` and `even_batches` do not apply.
        collate: Makes a batch of a list of samples.
        sampler: Another order, the same on all ranks. Not for streams.
        rank: This rank.
        world_size: The number of ranks.

    Returns:
        The loader; random numbers in its workers are the same at each pass.

    Raises:
        ConfigError: The dataset is empty, or dataset, sampler and settings do not fit together.
    """
    _check_dataset(dataset, sampler)
    is_shared = isinstance(dataset, IterableDataset) and is_rank_aware(dataset)
    if world_size > 1 and not is_shared and dispatches(config.dispatch_batches, dataset):
        return _dispatch(
            dataset, config, collate=collate, sampler=sampler, rank=rank, world_size=world_size, is_training=False
        )
    size = split_size(config.batch_size, world_size=world_size, split_batches=config.split_batches)
    options = _options(config, collate=collate, rank=rank, seed=config.seed)
    if isinstance(dataset, IterableDataset):
        if world_size > 1 and not is_shared:
            dataset = _shard(dataset, config, size=size, rank=rank, world_size=world_size, is_training=False)
        elif config.num_workers > 1 and not splits_among_workers(dataset):
            warn_once(
                f"{config.num_workers} workers evaluate a {type(dataset).__name__}: unless its __iter__ asks "
                "torch.utils.data.get_worker_info() for its share, each worker reads the whole stream and every "
                "sample counts several times. Use dataloader_num_workers=1 to be sure."
            )
        if config.persistent_workers:
            # Each pass starts the random numbers again, as it does in workers that are new themselves.
            dataset = EpochStream(dataset, seed=config.seed, rank=rank)
            dataset.set_epoch(0)
        return RankLoader(dataset, batch_size=size, drop_last=config.drop_last, **options)
    if sampler is None:
        sampler = SequentialSampler(dataset)
    give_generator(sampler, seed=config.seed)
    if world_size > 1 and not _is_rank_aware(sampler):
        unit = size if config.drop_last else 1
        sampler = ContiguousShard(sampler, rank=rank, world_size=world_size, unit=unit)
    return _map_loader(dataset, BatchSampler(sampler, size, config.drop_last), config, rank=rank, options=options)


def _dispatch(
    dataset: Any,
    config: LoaderConfig,
    *,
    collate: Collate,
    sampler: Any,
    rank: int,
    world_size: int,
    is_training: bool,
) -> DispatchLoader:
    """Build the loader of all ranks, as if there were one."""
    size = split_size(config.batch_size, world_size=world_size, split_batches=config.split_batches)
    alone = replace(config, batch_size=size, split_batches=False)
    if sampler is not None and _is_rank_aware(sampler):
        raise ConfigError(
            "dispatch_batches=True was asked for.",
            f"The {type(sampler).__name__} already gives each process its own share, and only one would be read.",
            "Return a sampler of the whole dataset, or set dispatch_batches=False.",
        )
    if is_training and isinstance(dataset, IterableDataset):
        # The innermost, which the epoch has to reach.
        dataset = EpochStream(dataset, seed=config.seed, rank=0)
    elif is_training and sampler is None:
        sampler = _train_sampler(dataset, config, world_size=world_size)
    loader = dispatch(
        partial(_build_alone, build_train_loader if is_training else build_eval_loader, alone, collate),
        dataset=dataset,
        sampler=sampler,
        batch_size=size,
        rank=rank,
        world_size=world_size,
        evens_out=is_training and config.even_batches and not config.drop_last,
        drops_rest=is_training and config.drop_last,
    )
    if is_training:
        _check_length(loader, config, world_size=world_size)
    return loader


def _build_alone(build: Callable[..., Any], config: LoaderConfig, collate: Collate, dataset: Any, sampler: Any) -> Any:
    return build(dataset, config, collate=collate, sampler=sampler)


def _check_length(batches: Any, config: LoaderConfig, *, world_size: int) -> None:
    if has_length(batches) and len(batches) == 0:
        raise ConfigError(
            "Training was asked for.",
            "The dataset is too small to give every process a full batch, and incomplete ones are left out.",
            "Make the batch smaller, or set dataloader_drop_last=False.",
            batch_size=config.batch_size,
            world_size=world_size,
        )


def _check_dataset(dataset: Any, sampler: Any) -> None:
    kind = type(dataset).__name__
    if has_length(dataset) and len(dataset) == 0:
        raise ConfigError(f"A {kind} was to be read.", "It is empty.", "Check how it was made or filtered.")
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise ConfigError(
                f"A sampler was given for a {kind}.",
                "A stream is read in its own order.",
                "Return None as its sampler.",
                sampler=type(sampler).__name__,
            )
    elif not hasattr(dataset, "__getitem__") or (sampler is None and not has_length(dataset)):
        raise ConfigError(
            f"A {kind} was to be read.",
            "It is neither an IterableDataset nor has it both __getitem__ and __len__.",
            "Derive it from torch.utils.data.Dataset or IterableDataset.",
        )


def default_train_sampler(dataset: Any, config: LoaderConfig, *, world_size: int) -> Any:
    """Return the order `build_train_loader` reads a dataset in when it is given none; None for a stream."""
    return _train_sampler(dataset, config, world_size=world_size) if has_length(dataset) else None


def _train_sampler(dataset: Any, config: LoaderConfig, *, world_size: int) -> Any:
    if not config.shuffle:
        return SequentialSampler(dataset)
    if config.use_seedable_sampler:
        return EpochShuffleSampler(dataset, seed=config.seed)
    if world_size == 1:
        return GlobalShuffleSampler(dataset)
    # The ranks have to agree on an order: their global generators do right after seeding, and drift apart later.
    return EpochShuffleSampler(dataset, seed=int(torch.empty((), dtype=torch.int64).random_()))


def _is_rank_aware(sampler: Any) -> bool:
    return any(is_rank_aware(part) for part in (sampler, *samplers_of(sampler)))


def _shard(dataset: Any, config: LoaderConfig, *, size: int, **place: Any) -> IterableDataset[Any]:
    return shard_stream(
        dataset,
        batch_size=size,
        drop_last=config.drop_last,
        even_batches=config.even_batches,
        num_workers=config.num_workers,
        seed=config.seed,
        **place,
    )


def _options(config: LoaderConfig, *, collate: Collate, rank: int, seed: int | None) -> dict[str, Any]:
    return {
        "collate_fn": collate,
        "num_workers": config.num_workers,
        "pin_memory": config.pin_memory,
        "persistent_workers": config.persistent_workers,
        "prefetch_factor": config.prefetch_factor,
        "multiprocessing_context": config.multiprocessing_context,
        "generator": new_generator(config.seed),
        "worker_init_fn": partial(start_worker, rank=rank, seed=seed),
    }


def _map_loader(dataset: Any, batches: Any, config: LoaderConfig, *, rank: int, options: dict[str, Any]) -> RankLoader:
    if config.num_workers > 0:
        batches = SeededBatches(batches, seed=config.seed, rank=rank)
    if type(batches) is not BatchSampler:
        return RankLoader(dataset, batch_sampler=batches, **options)
    # The plain form keeps `loader.batch_size`, `loader.sampler` and `loader.drop_last` as people expect them.
    return RankLoader(
        dataset, batch_size=batches.batch_size, sampler=batches.sampler, drop_last=batches.drop_last, **options
    )
