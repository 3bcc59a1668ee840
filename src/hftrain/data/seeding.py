"""Random numbers in loader workers: the same for a batch in every worker, and after a resume."""

from __future__ import annotations

import copy
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler, get_worker_info

from hftrain.core.seed import plain_rng
from hftrain.data.columns import CollatorWrapper

# The generators seeded here: the user's own seed, and the seed that was set. torch 2.9's support no weak
# references or attributes.
_SEEDED_GENERATORS: dict[int, tuple[torch.Generator, int | None, int]] = {}
_MAX_SEEDED = 64
# The seed of an unseeded torch generator.
_DEFAULT_SEED = torch.Generator().initial_seed()


def derive_seed(*parts: int) -> int:
    """Mix integers into one seed from 0 to 2**32 - 1; nearby integers give unrelated seeds."""
    return int(numpy.random.SeedSequence([part % 2**64 for part in parts]).generate_state(1)[0])


def seed_process(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator, the only ones that a worker may use."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def start_worker(worker_id: int, *, rank: int, seed: int | None = None) -> None:
    """Seed a new worker process and move it to its own process group; a `worker_init_fn` if `rank` is bound.

    Launchers and terminals signal the training process's whole group. That process may continue to the next
    step and save, for which it needs its workers. Without a seed, use torch's base seed, which the loader's
    generator draws for each epoch, the same on all ranks.
    """
    seed_process(derive_seed(torch.initial_seed() if seed is None else seed, rank, worker_id))
    if get_worker_info() is not None and hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def with_own_numbers(open_batches: Callable[[], Iterator[Any]], *, seed: int | None = None) -> Iterator[Any]:
    """Read batches in this process with random numbers independent of the training's, such as dropout's.

    The content of a stream's buffers then depends only on where the numbers start, and is the same when the stream is
    read again up to a batch.

    Args:
        seed: Where the numbers start; None for a copy of the global generators as they are now. If nothing else draws
            from these until the last batch, they then continue after the stream, as if it had drawn from them itself.
    """
    start_state = _rng_state()
    stream_state = start_state if seed is None else _seeded_rng_state(seed)

    def batches() -> Iterator[Any]:
        nonlocal stream_state
        iterator: Iterator[Any] | None = None
        while True:
            global_state = _exchange_rng_state(stream_state)
            is_over = False
            try:
                iterator = open_batches() if iterator is None else iterator
                batch = next(iterator)
            except StopIteration:
                is_over = True
            finally:
                stream_state = _exchange_rng_state(global_state)
            if is_over:
                if seed is None and _is_same_state(global_state, start_state):
                    _exchange_rng_state(stream_state)
                return
            yield batch

    return batches()


def with_own_numbers_later(batches: Iterator[Any]) -> Iterator[Any]:
    """Read the first batch with the global numbers, as a plain loop does, and the rest with a copy of them.

    What is drawn then does not depend on the dropout of the steps between, which a resume does not repeat.
    """
    for first in islice(batches, 1):
        remaining = with_own_numbers(lambda: batches)
        yield first
        yield from remaining


def _seeded_rng_state(seed: int) -> tuple[Any, ...]:
    global_state = _rng_state()
    seed_process(seed)
    return _exchange_rng_state(global_state)


def _rng_state() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(legacy=False), torch.default_generator.get_state()


def _exchange_rng_state(state: tuple[Any, ...]) -> tuple[Any, ...]:
    former_state = _rng_state()
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.default_generator.set_state(state[2])
    return former_state


def _is_same_state(state: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    first, second = ((python, plain_rng({"numpy": numpy_state})) for python, numpy_state, _ in (state, other))
    return first == second and torch.equal(state[2], other[2])


def new_generator(seed: int) -> torch.Generator:
    """Create a generator on the default device, as the loader and torch's samplers do."""
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


def find_user_seed(generator: torch.Generator) -> int | None:
    """Return the seed that the user gave a generator, before any `seed_generator`; None if there is none."""
    _, user_seed, last_seed = _SEEDED_GENERATORS.get(id(generator), (generator, None, _DEFAULT_SEED))
    current = generator.initial_seed()
    return user_seed if current == last_seed else current


def seed_generator(generator: torch.Generator, seed: int, *, user_seed: int | None) -> None:
    """Seed a generator and remember the user's own seed for it; mutates it."""
    generator.manual_seed(seed % 2**64)
    _SEEDED_GENERATORS.pop(id(generator), None)
    _SEEDED_GENERATORS[id(generator)] = generator, user_seed, generator.initial_seed()
    if len(_SEEDED_GENERATORS) > _MAX_SEEDED:
        del _SEEDED_GENERATORS[next(iter(_SEEDED_GENERATORS))]


class BatchWrapper(Sampler[Any]):
    """A batch sampler around another one, of which it has the batch size and the length."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.batch_sampler)


class SeededBatches(BatchWrapper):
    """Send a seed along with each batch of indices; each rank draws different numbers.

    Workers prefetch, and after a resume a batch may come from another worker. With a seed that depends only on the
    batch's position, the random numbers of a dataset or collator in a worker are the same in every run.
    """

    def __init__(self, batch_sampler: Any, *, seed: int, rank: int) -> None:
        super().__init__(batch_sampler)
        self._seed = seed
        self._rank = rank

    def __iter__(self) -> Iterator[list[Any]]:
        return self.seeded(self.batch_sampler, 0)

    def seeded(self, batches: Iterable[list[Any]], start: int) -> Iterator[list[Any]]:
        """Send the seeds along with batches; the first has the position `start` in its epoch."""
        for position, batch in enumerate(batches, start):
            yield _SeededBatch(batch, (self._seed, self._epoch, self._rank, position))


class _SeededBatch(list[Any]):
    """Indices that seed the process that unpickles them: the worker, right before it fetches them."""

    def __init__(self, indices: list[Any], parts: tuple[int, ...]) -> None:
        super().__init__(indices)
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (list(self), self._parts)


def _unpack(indices: list[Any], parts: tuple[int, ...]) -> list[Any]:
    seed_process(derive_seed(*parts))
    return indices


def draws_from_own_seed(collator: Any) -> bool:
    """Return whether a collator is transformers' for language modelling, with a `seed`."""
    return getattr(collator, "seed", None) is not None and callable(getattr(collator, "torch_mask_tokens", None))


class SeededCollator(CollatorWrapper):
    """Seed a collator's generator for each batch, so that workers, ranks and a resume do not change the masks.

    The collator itself draws on from where it was, which no checkpoint holds.

    Args:
        data_collator: A collator for which `draws_from_own_seed` holds. It is not changed.
    """

    def __init__(self, data_collator: Any) -> None:
        super().__init__(data_collator)
        self._seed: int = data_collator.seed
        self._masking = copy.copy(data_collator)
        self._masking.torch_mask_tokens = self._mask
        # Shared memory, because persistent workers have their own copy of this object.
        self._epoch = torch.tensor(0, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __call__(self, features: list[Any]) -> Any:
        return self._masking(features)

    def _mask(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seed = derive_seed(self._seed, int(self._epoch), zlib.crc32(inputs.numpy().tobytes()))
        self._masking.generator = torch.Generator().manual_seed(seed)
        collator_class: Any = type(self._masking)
        return collator_class.torch_mask_tokens(self._masking, inputs, *args, **kwargs)
