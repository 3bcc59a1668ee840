"""Whether the whole data is read: by all ranks together, and in a pass of one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import warn_once
from hftrain.data.datasets import has_length, splits_among_workers, whole_dataset
from hftrain.data.samplers import ContiguousShard, RankBatches, is_rank_aware, samplers_of, share_of_datasets
from hftrain.data.sharding import DispatchLoader, RankLoader, is_plain_loader


def check_shares(loader: Any, datasets: Iterable[Any], *, gather_object: Callable[[Any], list[Any]]) -> None:
    """Raise if ranks cut their shares from different datasets; warn of what each is assumed to read. Collective."""
    facts = gather_object(_fingerprint(loader))
    if any(fact != facts[0] for fact in facts):
        lengths = [None if fact is None else fact[0] for fact in facts]
        raise ConfigError(
            f"Cannot split the {type(whole_dataset(loader.dataset)).__name__} among {len(facts)} processes.",
            "It is not the same on all of them, as if split before or made of random numbers without a common seed: a "
            "part of each would never be read.",
            "Pass the whole dataset in every process. To read parts of your own, return a DataLoader of this process's "
            "part from get_train_dataloader, get_eval_dataloader or get_test_dataloader.",
            lengths_by_rank=lengths,
        )
    if _reads_all(loader) and any(loader.dataset is dataset for dataset in datasets):
        warn_once(
            f"Each of the {len(facts)} processes reads all of the {type(loader.dataset).__name__}: a DataLoader from "
            "get_train_dataloader, get_eval_dataloader or get_test_dataloader is read as it is. To split it, return "
            "self.accelerator.prepare(loader)."
        )
    whole = whole_dataset(getattr(loader, "dataset", None))
    is_declared = hasattr(whole, "world_size") or splits_among_workers(whole)
    if _is_cut(loader) and isinstance(whole, IterableDataset) and not is_declared:
        warn_once(
            f"{len(facts)} processes share the samples of {type(whole).__name__}, which is assumed to yield all of "
            "them in every process. If it does, give it the attribute world_size = 1. If it yields only this process's "
            "part, give it the attributes rank and world_size; it is then read as it is."
        )


def check_copies(loader: Any, *, rank: int, gather_object: Callable[[Any], list[Any]]) -> None:
    """Raise if processes that hold parts of one model would read different samples. Collective.

    Args:
        rank: Its data rank, which those processes have in common.
    """
    parts = (getattr(loader, "dataset", None), *samplers_of(loader)) if is_plain_loader(loader) else ()
    places = [getattr(source, "rank", None) for part in parts for source in (part, share_of_datasets(part))]
    places += [getattr(part, "process_index", None) for part in parts]
    facts = [len(loader) if has_length(loader) else None, [place for place in places if isinstance(place, int)]]
    for rank_, other_facts in (reports := gather_object([rank, facts])):
        if other_facts != next(expected for other_rank, expected in reports if other_rank == rank_):
            raise ConfigError(
                "Cannot read this loader on a mesh:",
                f"processes that hold parts of one model would read different samples (as data rank {rank_} does).",
                "Give a DistributedSampler the rank and world_size of trainer.strategy.data, or pass the whole "
                "dataset, which is split among the data ranks.",
            )


def check_pass(loader: Any, num_read: int, num_batches: int, *, is_training: bool = True) -> None:
    """Raise if a pass over map-style data ended early; in training, warn if other data has another length than stated.

    A pass may have any length, if the loader states it when the pass begins or when it ends.

    Args:
        num_read: Batches read when it ended, or more than `num_batches`.
        num_batches: Batches that it stated when it began, by its `__len__`.
        is_training: Whether the length is used for more than a progress bar.
    """
    reader = loader.loader if isinstance(loader, DispatchLoader) else loader
    kind = type(getattr(reader, "dataset", reader)).__name__
    length = len(loader) if has_length(loader) else num_batches
    if length == num_read or num_batches < num_read < length:
        return
    if num_read < num_batches and is_plain_loader(reader) and not isinstance(reader.dataset, IterableDataset):
        raise TaskError(
            f"A pass over {kind} ended after {num_read} of {num_batches} batches.",
            "Its __getitem__, the collator or the sampler raised StopIteration, as next() does when it has nothing "
            "left; or a sampler gave less than its __len__.",
            "Open what next() reads again when it is used up, or correct the sampler's __len__.",
        )
    if is_training and num_read != num_batches:
        ending = f"ended after {num_read}" if num_read < num_batches else f"goes on after {num_batches}"
        warn_once(
            f"A pass over {kind} {ending} batches, but its length is {num_batches}: the logged epochs and the planned "
            "steps are wrong. Correct its __len__, or leave it out and set max_steps."
        )


def _fingerprint(loader: Any) -> Any:
    """Return what is the same on all ranks that cut their shares from one dataset; None without a length."""
    dataset = whole_dataset(getattr(loader, "dataset", None))
    if not _is_cut(loader) or not has_length(dataset) or not len(dataset):
        return None
    return len(dataset), _end_samples(dataset)


def _is_cut(loader: Any) -> bool:
    """Return whether ranks cut their shares from one dataset."""
    parts = (getattr(loader, "dataset", None), *samplers_of(loader))
    return isinstance(loader, DispatchLoader) or any(
        isinstance(part, (RankBatches, ContiguousShard)) or getattr(part, "is_cut", False) is True for part in parts
    )


def _end_samples(dataset: Any) -> Any:
    """Return the first and last sample of data that can be read without running the user's code, in short."""
    if type(dataset) is Subset:
        return int(dataset.indices[0]), int(dataset.indices[-1]), _end_samples(dataset.dataset)
    if hasattr(dataset, "column_names") and callable(getattr(dataset, "with_format", None)):
        rows = dataset.with_format("arrow")[[0, len(dataset) - 1]]
        return zlib.crc32(repr(rows.to_pydict()).encode())
    if type(dataset) in (list, tuple, TensorDataset):
        ends = dataset[0], dataset[len(dataset) - 1]
        return zlib.crc32(json.dumps(ends, default=_summarize, skipkeys=True).encode())
    return None


def _summarize(value: Any) -> Any:
    """Return some numbers of a dense tensor or an array, and the type of anything else that JSON does not know."""
    if isinstance(value, (np.ndarray, np.generic)) or (torch.is_tensor(value) and value.layout is torch.strided):
        flat = value.ravel()
        return flat[:: len(flat) // 64 + 1].tolist()
    return type(value).__name__


def _reads_all(loader: Any) -> bool:
    is_own = is_plain_loader(loader) and not isinstance(loader, RankLoader)
    parts = (loader.dataset, *samplers_of(loader)) if is_own else ()
    return is_own and type(loader.sampler) in (RandomSampler, SequentialSampler) and not any(map(is_rank_aware, parts))
