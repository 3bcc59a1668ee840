"""In which order, and which share, a rank reads a map-style dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler

from hftrain.core.errors import ConfigError
from hftrain.data.seeding import new_generator
from hftrain.data.sizes import has_length


class EpochShuffleSampler(Sampler[int]):
    """Reshuffle in each epoch, as a function of the seed and the epoch alone.

    The order of epoch e is `torch.randperm(n)` drawn from a generator seeded with `seed + e`: the order in which the
    Hugging Face Trainer reads the same dataset with the same data seed.

    Args:
        data_source: The dataset; only its length is used, read again at each epoch.
        seed: The data seed.

    Example:
        >>> sampler = EpochShuffleSampler(range(5), seed=0)
        >>> sorted(sampler) == [0, 1, 2, 3, 4] and list(sampler) == list(sampler)
        True
    """

    def __init__(self, data_source: Sized, *, seed: int) -> None:
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration gives."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(len(self), generator=generator, device="cpu").tolist()
        return iter(order)

    def __len__(self) -> int:
        return len(self.data_source)


class GlobalShuffleSampler(RandomSampler):
    """Shuffle by torch's global generator, whatever it was used for before (`use_seedable_sampler=False`).

    The order cannot be found again after a resume in the middle of an epoch.
    """


class ContiguousShard(Sampler[Any]):
    """Give one rank its contiguous share of another sampler, without padding or repetition.

    With n samples and W ranks, rank r gets those from `n * r // W` to `n * (r + 1) // W`, so that the ranks' shares,
    one after the other, restore the order. A share may be empty.

    Args:
        sampler: What to share out: indices, or whole batches of them. It needs a length.
        rank: This rank.
        world_size: The number of ranks.
        unit: How many samples stay together; those that fill no unit are left out.

    Raises:
        ConfigError: The sampler has no length.

    Example:
        >>> [list(ContiguousShard(range(5), rank=rank, world_size=2)) for rank in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """

    def __init__(self, sampler: Any, *, rank: int, world_size: int, unit: int = 1) -> None:
        if not has_length(sampler):
            raise ConfigError(
                f"A {type(sampler).__name__} was to be split among {world_size} processes.",
                "Without a length nobody knows where one share ends and the next begins.",
                "Give it a __len__.",
            )
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._unit = unit

    def _bounds(self) -> tuple[int, int]:
        units = len(self.sampler) // self._unit
        first, last = (units * rank // self._world_size for rank in (self._rank, self._rank + 1))
        return first * self._unit, last * self._unit

    def __iter__(self) -> Iterator[Any]:
        return islice(self.sampler, *self._bounds())

    def __len__(self) -> int:
        start, stop = self._bounds()
        return stop - start


class SkippedBatches(Sampler[Any]):
    """Leave out the first batches of another batch sampler; only indices are drawn for them.

    Args:
        batch_sampler: Yields batches of indices.
        skip: How many to leave out.
    """

    def __init__(self, batch_sampler: Any, *, skip: int) -> None:
        self.batch_sampler = batch_sampler
        self._skip = self._left = skip
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._batches, self._left = iter(self.batch_sampler), self._skip
        return self

    def __next__(self) -> Any:
        self.start()
        return next(self._batches)

    def skip(self, num_batches: int) -> None:
        """Choose how many the next passes leave out."""
        self._skip = num_batches

    def start(self) -> None:
        """Draw the order, if the pass has begun and has not: samplers wait with it until the first batch."""
        for _ in range(self._left):
            next(self._batches, None)
        self._left = 0

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self._skip)


def samplers_of(loader: Any) -> list[Any]:
    """List the batch samplers and samplers inside a loader or sampler, each once, from the outside in."""
    found: list[Any] = []
    for name in ("batch_sampler", "sampler"):
        inner = getattr(loader, name, None)
        if inner is not None:
            found += [part for part in (inner, *samplers_of(inner)) if not any(part is known for known in found)]
    return found


def give_generator(sampler: Any, *, seed: int) -> None:
    """Give torch's random samplers a generator of their own where they would use the global one; mutates them.

    Without one, an order can neither be found again at a resume nor be agreed on by several ranks.
    """
    for part in (sampler, *samplers_of(sampler)):
        is_random = isinstance(part, Sampler) and not isinstance(part, GlobalShuffleSampler)
        if is_random and getattr(part, "generator", part) is None:
            part.generator = new_generator(seed)


def is_rank_aware(sampler: Any) -> bool:
    """Tell whether a sampler or dataset already gives each rank its own share.

    Known by the attributes of torch's `DistributedSampler` and of accelerate's shards, which look-alikes share, and of
    what `datasets.distributed.split_dataset_by_node` returns.
    """
    if getattr(getattr(sampler, "_distributed", None), "world_size", 1) > 1:
        return True
    for size, place in (("num_replicas", "rank"), ("num_processes", "process_index")):
        if hasattr(sampler, place) and getattr(sampler, size, 1) > 1:
            return True
    return False
