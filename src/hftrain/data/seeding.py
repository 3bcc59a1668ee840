"""Random numbers in loader workers: the same for a batch whichever worker makes it, and after a resume."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler, get_worker_info

# The generators that were seeded here last: the user's own seed, and the one that was set. torch 2.9's take no weak
# reference and no attribute.
_SEEDED: dict[int, tuple[torch.Generator, int | None, int]] = {}
_MOST_SEEDED = 64
# What torch gives a generator that nobody seeds.
_UNSEEDED = torch.Generator().initial_seed()


def derive_seed(*parts: int) -> int:
    """Mix integers into one seed from 0 to 2**32 - 1; nearby integers give unrelated seeds.

    Example:
        >>> derive_seed(42, 0) == derive_seed(42, 0) != derive_seed(42, 1)
        True
    """
    return int(numpy.random.SeedSequence([part % 2**64 for part in parts]).generate_state(1)[0])


def seed_process(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator, which is all that a worker may use."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def start_worker(worker_id: int, *, rank: int, seed: int | None = None) -> None:
    """Seed a new worker process, and put it into a process group of its own; a `worker_init_fn` once `rank` is bound.

    Launchers and terminals send a signal to the whole group of the process that trains. That one may go on to the next
    step and save, for which it needs its workers. Without a seed it starts from torch's base seed, which the loader's
    generator draws for each epoch, the same on all ranks.
    """
    seed_process(derive_seed(torch.initial_seed() if seed is None else seed, rank, worker_id))
    if get_worker_info() is not None and hasattr(os, "setpgid"):
        os.setpgid(0, 0)
        # What `dump_signal` names; standard error may be none in a notebook.
        with suppress(OSError, ValueError, AttributeError):
            faulthandler.register(signal.SIGUSR1, all_threads=False)


def dump_signal(worker_init_fn: Any) -> int | None:
    """Return the signal that makes a worker print its stack; None for workers that `start_worker` has not started."""
    inner = getattr(worker_init_fn, "inner", worker_init_fn)
    is_ours = isinstance(inner, partial) and inner.func is start_worker
    return signal.SIGUSR1 if is_ours and hasattr(signal, "SIGUSR1") else None


def with_own_numbers(open_batches: Callable[[], Iterator[Any]], *, seed: int) -> Iterator[Any]:
    """Read batches in this process with random numbers apart from those of the training, such as dropout's.

    What a stream remembers (a shuffled buffer, say) then depends on the seed alone, and comes out the same when the
    stream is read again up to some batch. NumPy's generator is exchanged, as copying its state takes long; for both
    that forgets the second one of a pair of normal numbers.
    """
    numbers: tuple[Any, ...] = (
        random.Random(seed).getstate(),
        numpy.random.MT19937(numpy.random.SeedSequence(seed)),
        torch.Generator().manual_seed(seed).get_state(),
    )
    batches: Iterator[Any] | None = None
    while True:
        outer = _exchange(numbers)
        try:
            if batches is None:
                batches = open_batches()
            batch = next(batches)
        except StopIteration:
            return
        finally:
            numbers = _exchange(outer)
        yield batch


def _exchange(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    of_numpy: Any = numpy.random
    found = random.getstate(), of_numpy.get_bit_generator(), torch.default_generator.get_state()
    random.setstate(numbers[0])
    of_numpy.set_bit_generator(numbers[1])
    torch.default_generator.set_state(numbers[2])
    return found


def new_generator(seed: int) -> torch.Generator:
    """Make a generator on the default device, where the loader and torch's samplers draw their numbers."""
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


def own_seed(generator: torch.Generator) -> int | None:
    """Return the seed that a user gave a generator, whatever `seed_generator` set since; None if there is none."""
    _, own, last = _SEEDED.get(id(generator), (generator, None, _UNSEEDED))
    now = generator.initial_seed()
    return own if now == last else now


def seed_generator(generator: torch.Generator, seed: int, *, own: int | None) -> None:
    """Seed a generator and remember the user's own seed for it; mutates it."""
    generator.manual_seed(seed % 2**64)
    _SEEDED.pop(id(generator), None)
    _SEEDED[id(generator)] = generator, own, generator.initial_seed()
    if len(_SEEDED) > _MOST_SEEDED:
        del _SEEDED[next(iter(_SEEDED))]


class SeededBatches(Sampler[list[Any]]):
    """Send a seed along with each batch of indices; each rank draws other numbers.

    Workers fetch ahead, and after a resume another worker makes a batch than before. With a seed that depends on the
    batch's place only, what a dataset or collator draws at random in a worker is the same in every run.

    Args:
        num_kept: How many of the last batches to keep in `sent`: as many as workers may have at a time.
    """

    def __init__(self, batch_sampler: Any, *, seed: int, rank: int, num_kept: int = 0) -> None:
        self.sent: deque[list[Any]] = deque(maxlen=num_kept)
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self._seed = seed
        self._rank = rank
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose seeds the next iteration sends."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[Any]]:
        return self.seeded(self.batch_sampler, 0)

    def seeded(self, batches: Iterable[list[Any]], start: int) -> Iterator[list[Any]]:
        """Send the seeds along with batches of which the first has the place `start` in its epoch."""
        for position, batch in enumerate(batches, start):
            self.sent.append(batch)
            yield _SeededBatch(batch, (self._seed, self._epoch, self._rank, position))

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _SeededBatch(list[Any]):
    """Indices that seed the process they are unpacked in: the worker, right before it fetches them."""

    def __init__(self, indices: list[Any], parts: tuple[int, ...]) -> None:
        super().__init__(indices)
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (list(self), self._parts)


def _unpack(indices: list[Any], parts: tuple[int, ...]) -> list[Any]:
    seed_process(derive_seed(*parts))
    return indices
