"""Iterable datasets: their epochs, and each rank's share."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import get_worker_info

from hftrain.core.errors import TaskError
from hftrain.data.datasets import StreamWrapper, has_state, set_dataset_epoch
from hftrain.data.samplers import even_out
from hftrain.data.seeding import derive_seed, seed_process


class EpochStream(StreamWrapper):
    """Forward the epoch to every copy of a stream, including those in persistent workers.

    Workers hold copies of the dataset, which `set_epoch` in the main process does not reach once they run. Here the
    epoch is in shared memory, and each copy applies it when it starts to iterate.

    A stream with a state begins each epoch in the state of a new worker's copy, also in persistent workers. A
    `generator` of the stream is seeded with `seed + epoch`; the workers of each rank draw different numbers.
    """

    seeds_workers = True

    def __init__(self, dataset: Any, *, seed: int, rank: int) -> None:
        super().__init__(dataset)
        self._seed = seed
        self._rank = rank
        self._epoch_begun: int | None = None
        self._first_state: Any = None
        # A state from which nothing was read yet: a stream may not return it before it is iterated.
        self._unread_state: Any = None
        self._is_loaded = self._is_over = False
        # Batches of this worker in this epoch; counted if each batch has a state, and part of the next batch's seed.
        self.num_batches = 0
        self._epoch = torch.tensor(-1, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; until then the stream does not change."""
        # Set here, because streams of `datasets` share their epoch among all copies and change it by an increment
        # (`+=`), which would apply several times if all workers did it at once.
        set_dataset_epoch(self.dataset, epoch=epoch, seed=self._seed)
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch, is_loaded = int(self._epoch), self._is_loaded
        self._is_loaded = False
        if epoch >= 0:
            if get_worker_info() is not None:
                self._begin(epoch, is_loaded=is_loaded)
            set_dataset_epoch(self.dataset, epoch=epoch, seed=self._seed)
        if not has_state(self.dataset):
            return iter(self.dataset)
        if is_loaded and self._is_over:
            return iter(())
        self._is_over = False
        return self._until_over(iter(self.dataset))

    def _begin(self, epoch: int, *, is_loaded: bool) -> None:
        if self._epoch_begun is None:
            if has_state(self.dataset) and not is_loaded:
                self._first_state = copy.deepcopy(self.dataset.state_dict())
        elif epoch != self._epoch_begun:
            # Also with a loaded state: it is what remains of an epoch that was filled up.
            self.num_batches = 0
            if has_state(self.dataset):
                self.load_state_dict({"stream": self._first_state, "is_over": False})
                self._is_loaded = False
        self._epoch_begun = epoch
        self._seed_worker(epoch)

    def _until_over(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in islice(items, 1):
            self._unread_state = None
            yield item
        yield from items
        # An incomplete last batch has reached the end; the stream's own state may already be that of a new start.
        self._is_over = True

    def _seed_worker(self, epoch: int) -> None:
        worker: Any = get_worker_info()
        place = (self.num_batches,) if self.num_batches else ()
        seed_process(derive_seed(self._seed, epoch, self._rank, worker.id, *place))

    def end_batch(self) -> None:
        """Count a worker's batch, and seed the worker for the next one by its position only."""
        self.num_batches += 1
        self._seed_worker(int(self._epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream, and whether it was read to its end."""
        stream = self.dataset.state_dict() if self._unread_state is None else self._unread_state
        return {"stream": stream, "is_over": self._is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._epoch_begun is None and not self._is_loaded:
            self._first_state = copy.deepcopy(self.dataset.state_dict())
        self._is_loaded, self._is_over, self._unread_state = True, bool(state["is_over"]), state["stream"]
        self.dataset.load_state_dict(copy.deepcopy(self._unread_state))


class BatchShardStream(StreamWrapper):
    """Give rank r the batches r, r + W, r + 2W, ... of a stream, without padding or repetition.

    Every rank reads the whole stream, whose order must be the same on all ranks. A rank may get one batch less, unless
    `drops_rest` drops a last round without a full batch for every rank.

    Example:
        >>> from torch.utils.data import IterableDataset
        >>> class Count(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> [list(BatchShardStream(Count(), batch_size=2, rank=rank, world_size=2)) for rank in (0, 1)]
        [[0, 1, 4], [2, 3]]
    """

    is_cut = passes_batches_on = True

    def __init__(self, dataset: Any, *, batch_size: int, rank: int, world_size: int, drops_rest: bool = False) -> None:
        super().__init__(dataset)
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._drops_rest = drops_rest

    def __iter__(self) -> Iterator[Any]:
        # In whole rounds, so that the stream's position is the same on all ranks when each has its batch.
        stream, unit = iter(self.dataset), self._batch_size * self._world_size
        start = self._rank * self._batch_size
        while (samples := list(islice(stream, unit))) and (len(samples) == unit or not self._drops_rest):
            yield from samples[start : start + self._batch_size]

    def __len__(self) -> int:
        full, tail = divmod(len(self.dataset), self._batch_size)
        rounds, num_extra = divmod(full, self._world_size)
        if self._drops_rest:
            return rounds * self._batch_size
        return (rounds + (self._rank < num_extra)) * self._batch_size + (tail if self._rank == num_extra else 0)


class EvenedStream(StreamWrapper):
    """Fill a stream up to a multiple of `unit`, in each worker that reads it; see `even_out`.

    The first samples of a stream with a state are read again; those of others are kept in memory.
    """

    passes_batches_on = True

    def __init__(self, dataset: Any, *, unit: int) -> None:
        super().__init__(dataset)
        self._unit = unit
        self._count = 0
        self._first_state: Any = None
        # Where the pass ended, before it was filled up.
        self._end: Any = None
        self._is_loaded = self._is_over = self._is_filled = False

    def __iter__(self) -> Iterator[Any]:
        return self._iterate_filled() if has_state(self.dataset) else even_out(self.dataset, self._unit)

    def _iterate_filled(self) -> Iterator[Any]:
        is_loaded, self._is_loaded = self._is_loaded, False
        # After a state of the end a stream gives nothing once or twice, and then starts over.
        passes = (self.dataset, self.dataset)
        # Even if nothing is read: an epoch must consume the loaded state, or the next one would begin with it.
        stream = iter(self.dataset)
        if not is_loaded:
            self._count, self._is_over, self._is_filled = 0, False, False
            self._first_state = copy.deepcopy(self.dataset.state_dict())
        if not self._is_over:
            yield from self._count_items(stream, *(() if is_loaded else passes))
            self._is_over, self._end = True, copy.deepcopy(self.dataset.state_dict())
        elif self._count % self._unit:
            yield from islice(self._count_items(stream), -self._count % self._unit)
        # More than once if the stream is shorter than what is missing.
        while self._count % self._unit:
            num_before, self._is_filled = self._count, True
            self.dataset.load_state_dict(copy.deepcopy(self._first_state))
            yield from islice(self._count_items(self.dataset, *passes), -self._count % self._unit)
            if self._count == num_before:
                raise TaskError(
                    "Cannot fill up a stream from its start, so that all processes get as many samples.",
                    "Put back into the state in which the epoch began, it gave none.",
                    "Let its load_state_dict lead back to that place, or set dataloader_drop_last=True.",
                )
        if self._is_filled:
            # The next pass begins where this one ended, as if it had not been filled up.
            self.dataset.load_state_dict(copy.deepcopy(self._end))

    def _count_items(self, *attempts: Iterable[Any]) -> Iterator[Any]:
        num_before = self._count
        for items in attempts:
            for item in items:
                self._count += 1
                yield item
            if self._count != num_before:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's state and the data needed to fill it up."""
        count = self._count % self._unit
        filling = {"start": self._first_state, "end": self._end, "count": count}
        filling |= {"is_over": self._is_over, "is_filled": self._is_filled}
        return {"stream": self._end if self._is_filled and not count else self.dataset.state_dict(), **filling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first_state, self._count = state["start"], int(state["count"])
        self._end = state.get("end", self._first_state)  # as older checkpoints had it
        self._is_loaded, self._is_over, self._is_filled = True, bool(state["is_over"]), bool(state["is_filled"])
        self.dataset.load_state_dict(state["stream"])

    def __len__(self) -> int:
        return -(-len(self.dataset) // self._unit) * self._unit
