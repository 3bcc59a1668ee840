"""Loaders of this process's batches: how many are read, and whether what their workers need can be sent to them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from pickle import dumps
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.data.columns import CollatorWrapper
from hftrain.data.datasets import epoch_stream, has_length, splits_among_workers, whole_dataset
from hftrain.data.samplers import EpochShuffleSampler, GlobalShuffleSampler, give_generator, is_rank_aware, samplers_of
from hftrain.data.seeding import new_generator, start_worker
from hftrain.data.sharding import DispatchLoader, RankLoader, ShardPlan, on_reader, rebuild_loader
from hftrain.data.states import with_seeds


def noticing_copies(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the same batches; warn if each worker of a stream's loader reads the whole stream.

    Workers take turns. If all of them give the same batch, and in the next round the same other batch, each of them
    reads the same data. Batches are compared until two differ.
    """
    num_workers, dataset = getattr(loader, "num_workers", 0), getattr(loader, "dataset", None)
    if num_workers < 2 or not isinstance(dataset, IterableDataset):
        return batches
    return chain(_compared(batches, num_workers, dataset), batches)


def _compared(batches: Iterator[Any], num_workers: int, dataset: Any) -> Iterator[Any]:
    rounds: list[bytes] = []
    for position, batch in enumerate(islice(batches, 2 * num_workers)):
        try:
            content = dumps(map_tensors(batch, _content))
        except Exception:  # a batch whose content cannot be compared
            content = b""
        yield batch
        is_new = position % num_workers == 0
        if not content or (content in rounds if is_new else content != rounds[-1]):
            return
        rounds += [content] if is_new else []
    if position == 2 * num_workers - 1:
        warn_once(
            f"Each of the {num_workers} loader workers reads the whole {type(whole_dataset(dataset)).__name__}, so "
            f"each sample is trained on {num_workers} times per epoch. Let its __iter__ return the share that "
            "torch.utils.data.get_worker_info() asks for, or set dataloader_num_workers=1."
        )


def _content(tensor: torch.Tensor) -> bytes:
    # Not pickled: that would include the place in memory.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_sendable(parts: Mapping[str, Any], *, num_workers: int, method: str | None = None) -> None:
    """Raise if a part cannot be sent to worker processes; the keys name the parts in the error.

    The contents of tensors are not read.
    """
    method = method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if num_workers == 0 or method == "fork":
        return
    for name, part in parts.items():
        try:
            with open(os.devnull, "wb") as nowhere:
                _DryPickler(nowhere).dump(part)
        except Exception as error:
            raise ConfigError(
                f"Cannot use dataloader_num_workers={num_workers} when processes are started by {method!r}.",
                f"{name} ({type(part).__name__}) cannot be sent to a worker: {error}.",
                "Define its functions and classes at the top level of a module, open files in the worker, at the "
                "first sample, or set dataloader_num_workers=0.",
            ) from error


class _DryPickler(ForkingPickler):
    """Pickle an object without its tensors, which are large and can always be sent."""

    def reducer_override(self, obj: Any) -> Any:
        is_array = isinstance(obj, numpy.ndarray) and obj.dtype != object
        return (int, ()) if is_array or isinstance(obj, (torch.Tensor, torch.UntypedStorage)) else NotImplemented


Collate = Callable[[list[Any]], Any]


def build_loader(
    dataset: Any,
    plan: ShardPlan,
    *,
    batch_size: int,
    collate: Collate,
    sampler: Any = None,
    drop_last: bool = False,
    persistent_workers: bool = False,
    **options: Any,
) -> RankLoader | DispatchLoader:
    """Build this rank's loader; creating an iterator does not touch torch's global generator.

    Args:
        batch_size: Samples per batch of one rank, or of all ranks together with `split_batches`.
        sampler: The order, the same on all ranks; None reads in order. A sampler made for several ranks, such
            as torch's `DistributedSampler`, is not sharded again. Not for streams.
        options: Further arguments of torch's `DataLoader`.

    Raises:
        ConfigError: Training would get no batch, or the dataset, sampler and settings are incompatible.
    """
    if has_length(dataset) and len(dataset) == 0:
        raise ConfigError(f"Cannot read the {type(dataset).__name__}.", "It is empty.", "Check how it was made.")
    is_stream = isinstance(dataset, IterableDataset)
    if not (is_stream or sampler is not None or hasattr(dataset, "__len__")):
        remedy = "Give its class __len__ and __getitem__, or derive it from torch.utils.data.IterableDataset."
        raise ConfigError(f"Cannot read the {type(dataset).__name__}.", "It does not say how long it is.", remedy)
    if not is_stream:
        _check_order(dataset, sampler, plan, persistent_workers=persistent_workers)
        give_generator(sampler, seed=plan.seed)
    loader: Any = RankLoader(
        dataset,
        batch_size=plan.size_of(batch_size),
        sampler=sampler,
        drop_last=drop_last,
        persistent_workers=persistent_workers,
        collate_fn=StreamCollator(collate) if is_stream else collate,
        generator=new_generator(plan.seed),
        # Evaluations use the same random numbers in each pass.
        worker_init_fn=partial(start_worker, rank=plan.rank, seed=None if plan.is_training else plan.seed),
        **options,
    )
    loader = replace(plan, split_batches=False).split(loader)
    is_counted = plan.is_training and (not is_stream or isinstance(loader, DispatchLoader))
    if is_counted and has_length(loader) and len(loader) == 0:
        raise ConfigError(
            "Cannot train.",
            "The dataset is too small to give every process a full batch, and incomplete ones are left out.",
            "Make the batch smaller, or set dataloader_drop_last=False.",
            batch_size=batch_size,
            world_size=plan.world_size,
        )
    if is_stream:
        return on_reader(loader, partial(_with_epochs, plan=plan))  # type: ignore[no-any-return]
    return on_reader(loader, partial(with_seeds, seed=plan.seed, rank=plan.rank))  # type: ignore[no-any-return]


class StreamCollator(CollatorWrapper):
    """Call a collator; its `StopIteration`, which torch would take for the end of the stream, is an error."""

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.data_collator(samples)
        except StopIteration as error:
            raise TaskError(
                "Cannot collate a batch of a stream:",
                "the collator raised StopIteration, as next() does when it has nothing left.",
                "Open what next() reads again when it is used up.",
            ) from error


def default_train_sampler(
    dataset: Any, plan: ShardPlan, *, shuffle: bool = True, use_seedable_sampler: bool = True
) -> Any:
    """Return the default sampler of training; None for a dataset without a length.

    Args:
        use_seedable_sampler: Whether the order depends only on the data seed and the epoch; otherwise torch's global
            generator determines it, and a resume in the middle of an epoch cannot reproduce it.
    """
    if not has_length(dataset):
        return None
    if not shuffle:
        return SequentialSampler(dataset)
    if use_seedable_sampler:
        return EpochShuffleSampler(dataset, seed=plan.seed)
    if plan.world_size == 1:
        return GlobalShuffleSampler(dataset)
    # All ranks need the same order: their global generators agree right after seeding, and diverge later.
    return EpochShuffleSampler(dataset, seed=int(torch.empty((), dtype=torch.int64).random_()))


def _check_order(dataset: Any, sampler: Any, plan: ShardPlan, *, persistent_workers: bool) -> None:
    if plan.dispatches(dataset) and any(is_rank_aware(part) for part in (sampler, *samplers_of(sampler))):
        raise ConfigError(
            "Cannot use dispatch_batches=True.",
            f"The {type(sampler).__name__} already gives each process its own share, and only one would be read.",
            "Return a sampler of the whole dataset, or set dispatch_batches=False.",
        )
    if plan.is_training and persistent_workers and hasattr(dataset, "set_epoch"):
        raise ConfigError(
            f"Cannot keep persistent workers for a {type(dataset).__name__}.",
            "Its set_epoch would never reach the copies in workers that outlive an epoch.",
            "Set dataloader_persistent_workers=False.",
            persistent_workers=True,
        )


def _with_epochs(loader: Any, plan: ShardPlan) -> Any:
    """Forward the epoch to a stream in persistent workers."""
    dataset: Any = loader.dataset
    if not plan.is_training and loader.num_workers > 1 and not splits_among_workers(whole_dataset(dataset)):
        warn_once(
            f"{loader.num_workers} workers evaluate a {type(dataset).__name__}: unless its __iter__ asks "
            "torch.utils.data.get_worker_info() for its share, each worker reads the whole stream and every "
            "sample counts several times. Use dataloader_num_workers=1 to be sure."
        )
    if not loader.persistent_workers or (plan.is_training and epoch_stream(dataset) is not None):
        return loader
    stream = extra("streams").EpochStream(dataset, seed=plan.seed, rank=plan.rank)
    if not plan.is_training:
        # Each pass restarts the random numbers, as in new workers.
        stream.set_epoch(0)
    return rebuild_loader(loader, dataset=stream)


class Limits:
    """Read every batch; `hftrain.extras.limits` has the limits of a Trainer that sets one.

    Attributes:
        facts: The settings that leave data out, in plain values; checkpoints and reports name them.
        of_training: The setting that decides what a run is trained on, if there is one; a resume compares it.
        of_evaluation: That of evaluations, likewise.
        sanity_eval_batches: How many batches of each set are evaluated before the first step.
    """

    facts: Mapping[str, int | float] = {}
    of_training: Mapping[str, int | float] = {}
    of_evaluation: Mapping[str, int | float] = {}
    sanity_eval_batches = 0

    def num_train(self, num_batches: int | None) -> int | None:
        """Return the batches in a pass of one process, of as many as its loader has (None: unknown)."""
        return num_batches

    def for_evaluation(self, loader: Any) -> Any:
        """Return the part of an evaluation loader that is read."""
        return loader


def make_limits(**settings: int | float | None) -> Limits:
    """Return the limits of a Trainer, from its settings whose names end with ``_batches``."""
    is_limited = any(value is not None for value in settings.values())
    limits: Limits = extra("limits").SetLimits(**settings) if is_limited else Limits()
    return limits


def first_batches(loader: Any, number: int) -> Any:
    """Return a loader of the first batches of an evaluation loader, or the loader itself if `number` is 0."""
    return extra("limits").FirstBatches(loader, number) if number else loader
