"""The documented samplers, stream shards and loader helpers, for code that builds its own loaders.

The Trainer's own loaders use `hftrain.data.grouping` and `hftrain.data.sharding`, which yield every sample once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from hftrain.core.errors import ConfigError
from hftrain.core.seed import set_seed
from hftrain.data.grouping import LengthConfig, grouped_order, sample_lengths


def get_length_grouped_indices(
    lengths: Any, batch_size: int, mega_batch_mult: int | None = None, generator: torch.Generator | None = None
) -> list[int]:
    """Return an order in which neighbouring samples have similar lengths, with the longest sample first.

    Args:
        lengths: The length of each sample.
        batch_size: Samples of similar length.
        mega_batch_mult: Batches that are sorted together; None takes up to 50.
        generator: The generator of the order; None for torch's global one.

    Source: the documented `get_length_grouped_indices`.
    """
    order: list[int] = grouped_order(lengths, batch_size, num_batches=mega_batch_mult, generator=generator).tolist()
    return order


class LengthGroupedSampler(Sampler[int]):
    """Shuffle so that neighbouring samples have similar lengths.

    Args:
        batch_size: Samples of similar length.
        dataset: The dataset; not needed if `lengths` are given.
        lengths: The length of each sample.
        model_input_name: The field of a sample that determines its length; ``"input_ids"`` by default.
        generator: The generator of the order; None for torch's global one.

    Raises:
        ConfigError: There are neither lengths nor samples with that field.

    Source: the documented `LengthGroupedSampler`.

    Example:
        >>> sampler = LengthGroupedSampler(2, lengths=[1, 9, 2, 8])
        >>> next(iter(sampler)), sorted(sampler)
        (1, [0, 1, 2, 3])
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Any = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = _lengths(dataset, lengths, model_input_name)
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))

    def __len__(self) -> int:
        return len(self.lengths)


class DistributedLengthGroupedSampler(DistributedSampler[int]):
    """Length-grouped sampler for several processes: each takes every n-th index; the order wraps around to fill up.

    Args:
        batch_size: Samples of similar length.
        dataset: The dataset; not needed if `lengths` are given.
        num_replicas: The number of processes; the process group's by default.
        rank: The rank of this process; the process group's by default.
        seed: The order of epoch e is drawn from `seed + e`.
        drop_last: Drop samples instead of repeating some.
        lengths: The length of each sample.
        model_input_name: The field of a sample that determines its length; ``"input_ids"`` by default.

    Raises:
        ConfigError: There are neither lengths nor samples with that field.

    Source: the documented `DistributedLengthGroupedSampler`.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Any = None,
        model_input_name: str | None = None,
    ) -> None:
        self.lengths = _lengths(dataset, lengths, model_input_name)
        self.batch_size = batch_size
        super().__init__(self.lengths, num_replicas, rank, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        return islice(islice(cycle(order), self.total_size), self.rank, None, self.num_replicas)


class SequentialDistributedSampler(Sampler[int]):
    """Give each process a contiguous share of equal length; indices wrap around to fill up the last share.

    Args:
        dataset: The dataset.
        num_replicas: The number of processes; the process group's by default.
        rank: The rank of this process; the process group's by default.
        batch_size: Make the shares a multiple of this.

    Source: the documented `SequentialDistributedSampler`.

    Example:
        >>> [list(SequentialDistributedSampler("abcde", num_replicas=2, rank=rank)) for rank in (0, 1)]
        [[0, 1, 2], [3, 4, 0]]
    """

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, batch_size: int | None = None
    ) -> None:
        self.dataset = dataset
        self.num_replicas = torch.distributed.get_world_size() if num_replicas is None else num_replicas
        self.rank = torch.distributed.get_rank() if rank is None else rank
        self.batch_size = batch_size
        unit = batch_size or 1
        self.num_samples = math.ceil(len(dataset) / (unit * self.num_replicas)) * unit
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        start = self.rank * self.num_samples
        return islice(cycle(range(len(self.dataset))), start, start + self.num_samples)

    def __len__(self) -> int:
        return self.num_samples


class IterableDatasetShard(IterableDataset[Any]):
    """Give one process its share of a stream, batch by batch; the last round wraps around to fill up.

    Args:
        dataset: The stream, which every process reads in the same order.
        batch_size: Samples that a process takes at once.
        drop_last: Drop an incomplete last round.
        num_processes: The number of processes.
        process_index: The index of this process.
        seed: A stream's `generator` is seeded with this plus the epoch.

    Source: the documented `IterableDatasetShard`.

    Example:
        >>> [list(IterableDatasetShard(range(5), 2, num_processes=2, process_index=rank)) for rank in (0, 1)]
        [[0, 1, 4, 0], [2, 3, 1, 2]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.seed = seed
        self.epoch = 0
        self.num_examples = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)
        self.num_examples = 0
        size = self.batch_size * self.num_processes
        mine = slice(self.process_index * self.batch_size, (self.process_index + 1) * self.batch_size)
        stream, first = iter(self.dataset), None
        while samples := list(islice(stream, size)):
            self.num_examples += len(samples)
            first = first or samples
            if len(samples) < size:
                if self.drop_last:
                    return
                samples = samples + list(islice(cycle(first), size - len(samples)))
            yield from samples[mine]

    def __len__(self) -> int:
        rounds = len(self.dataset) / (self.batch_size * self.num_processes)
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self.batch_size


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed a loader's worker by its torch seed and its rank. Source: the documented `seed_worker`."""
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)


def _lengths(dataset: Any, lengths: Any, name: str | None) -> list[int]:
    if lengths is not None:
        return lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    if dataset is None:
        raise ConfigError("Cannot order samples by length:", "no lengths are given.", "Pass them, or a dataset.")
    found: list[int] = sample_lengths(dataset, LengthConfig(input_name=name or "input_ids")).tolist()
    return found
