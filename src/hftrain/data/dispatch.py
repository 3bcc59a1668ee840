"""One process reads for all: the main process sends each rank its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from hftrain.core.errors import TaskError
from hftrain.data.wrappers import StreamWrapper, has_state

# What a rank receives each round: its batch, if it gets one; whether this was the last round; why reading failed.
Parcel = tuple[list[Any], bool, str | None]


def dispatches(setting: bool | None, dataset: Any) -> bool:
    """Tell whether the main process reads for all: as `setting` says, else for streams if there is a process group."""
    if setting is not None:
        return setting
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return has_group and isinstance(dataset, IterableDataset)


def even_out(items: Iterable[Any], unit: int) -> Iterator[Any]:
    """Yield items, then those of the start again until their number is a multiple of `unit`.

    Example:
        >>> list(even_out([1, 2, 3], 2)), list(even_out([1], 3)), list(even_out([], 2))
        ([1, 2, 3, 1], [1, 1, 1], [])
    """
    first: list[Any] = []
    count = 0
    for item in items:
        if count < unit:
            first.append(item)
        count += 1
        yield item
    yield from islice(cycle(first), -count % unit)


class EvenedSampler(Sampler[Any]):
    """Fill another sampler (of indices, or of batches) up to a multiple of `unit`; see `even_out`.

    Args:
        sampler: What to fill up.
        unit: How many make a full round of all ranks.
    """

    def __init__(self, sampler: Any, *, unit: int) -> None:
        self.sampler = sampler
        self._unit = unit

    def __iter__(self) -> Iterator[Any]:
        return even_out(self.sampler, self._unit)

    def __len__(self) -> int:
        return -(-len(self.sampler) // self._unit) * self._unit


class EvenedStream(StreamWrapper):
    """Fill a stream up to a multiple of `unit`, in each worker that reads it; see `even_out`.

    A stream with a state is read again for that, as from its start; others are remembered.

    Args:
        dataset: The stream.
        unit: How many make a full round of all ranks.
    """

    def __init__(self, dataset: Any, *, unit: int) -> None:
        super().__init__(dataset)
        self._unit = unit
        self._count = 0
        self._first_state: Any = None
        self._is_loaded = self._is_over = self._is_filled = False

    def __iter__(self) -> Iterator[Any]:
        return self._read_again() if has_state(self.dataset) else even_out(self.dataset, self._unit)

    def _read_again(self) -> Iterator[Any]:
        is_loaded, self._is_loaded = self._is_loaded, False
        # Even for nothing: an epoch has to use up the state that was loaded, or the next one would begin with it.
        stream = iter(self.dataset)
        if not is_loaded:
            self._count, self._is_over, self._is_filled = 0, False, False
            self._first_state = copy.deepcopy(self.dataset.state_dict())
        if not self._is_over:
            yield from self._counted(stream)
            self._is_over = True
        elif self._count % self._unit:
            yield from self._counted(islice(stream, -self._count % self._unit))
        # More than once where the stream is shorter than what is missing.
        while self._count % self._unit:
            before, self._is_filled = self._count, True
            self.dataset.load_state_dict(copy.deepcopy(self._first_state))
            yield from self._counted(islice(self.dataset, -self._count % self._unit))
            if self._count == before:
                raise _cannot_fill()
        if self._is_filled:
            # Where it stopped tells nothing.
            self.dataset.load_state_dict(copy.deepcopy(self._first_state))

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's state, and what filling it up needs."""
        count = self._count % self._unit
        own = {"start": self._first_state, "count": count, "is_over": self._is_over, "is_filled": self._is_filled}
        return {"stream": self._first_state if self._is_filled and not count else self.dataset.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned, for the iteration that follows."""
        self._first_state, self._count = state["start"], int(state["count"])
        self._is_loaded, self._is_over, self._is_filled = True, bool(state["is_over"]), bool(state["is_filled"])
        self.dataset.load_state_dict(state["stream"])

    def __len__(self) -> int:
        return -(-len(self.dataset) // self._unit) * self._unit


def takes_turns(loader: Any) -> bool:
    """Tell whether ranks read a loader's batches in turn (rank r of W the batches r, r + W, ...), or a run each."""
    return isinstance(loader, DispatchLoader) or isinstance(getattr(loader, "dataset", None), IterableDataset)


class DispatchLoader:
    """Give rank r the batches r, r + W, ... of a loader that the main process alone iterates.

    Taking a batch is collective: a round of batches, one for each rank, is sent as it is read. Batches may hold
    anything that can be pickled, and differ in shape. Whatever else is asked of this object, the loader answers.

    Args:
        loader: Yields the batches of all ranks in turn; iterated on the main process only.
        rank: This rank.
        world_size: The number of ranks, W.
        drops_rest: Leave out a last round that has no batch for every rank.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int, drops_rest: bool) -> None:
        self.loader = loader
        self.rank = rank
        self.world_size = world_size
        self.drops_rest = drops_rest

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.loader), self.world_size)
        return rounds + (self.rank < rest and not self.drops_rest)

    def __iter__(self) -> Iterator[Any]:
        # Begun now, not at the first batch: what an epoch's order is drawn from is set up at this moment.
        return self._receive(iter(self.loader) if self.rank == 0 else iter(()))

    def with_loader(self, loader: Any) -> DispatchLoader:
        """Return the same for another loader."""
        return DispatchLoader(loader, rank=self.rank, world_size=self.world_size, drops_rest=self.drops_rest)

    def _receive(self, batches: Iterator[Any]) -> Iterator[Any]:
        is_last = False
        while not is_last:
            if self.rank == 0:
                batch, is_last = self._send_round(batches)
            else:
                parcel = _scatter(None)
                batch, is_last = parcel[:2]
                if parcel[2] is not None:
                    raise _main_failed(parcel[2])
            yield from batch

    def _send_round(self, batches: Iterator[Any]) -> tuple[list[Any], bool]:
        try:
            round_ = list(islice(batches, self.world_size))
        except Exception as error:
            _scatter([([], True, f"{type(error).__name__}: {error}")] * self.world_size)
            raise
        is_last = len(round_) < self.world_size
        if is_last and self.drops_rest:
            round_ = []
        others: list[Parcel] = [(round_[rank : rank + 1], is_last, None) for rank in range(1, self.world_size)]
        _scatter([([], is_last, None), *others])
        return round_[:1], is_last


def dispatch(
    build: Callable[..., Any],
    *,
    dataset: Any,
    sampler: Any,
    batch_size: int,
    rank: int,
    world_size: int,
    evens_out: bool,
    drops_rest: bool,
) -> DispatchLoader:
    """Build a loader for all ranks, and share out what the main process reads with it.

    Args:
        build: (dataset, sampler) -> loader with batches of one rank's size.
        dataset: What is read.
        sampler: Its order; None for a stream.
        batch_size: Samples per batch of one rank; 1 if `sampler` yields batches.
        rank: This rank.
        world_size: The number of ranks.
        evens_out: Fill the last round up from the start.
        drops_rest: Leave out a last round that has no batch for every rank.
    """
    unit = batch_size * world_size
    if evens_out and isinstance(dataset, IterableDataset):
        dataset = EvenedStream(dataset, unit=unit)
    elif evens_out:
        sampler = EvenedSampler(sampler, unit=unit)
    return DispatchLoader(build(dataset, sampler), rank=rank, world_size=world_size, drops_rest=drops_rest)


def _scatter(parcels: list[Parcel] | None) -> Parcel:
    """Send each rank its parcel; the main process gives them, the others get theirs. Collective."""
    received: list[Any] = [None]
    torch.distributed.scatter_object_list(received, parcels, src=0)
    return received[0]  # type: ignore[no-any-return]


def _cannot_fill() -> TaskError:
    return TaskError(
        "A stream was to be filled up from its start, so that all processes get as many samples.",
        "Put back into the state in which the epoch began, it gave none.",
        "Let its load_state_dict lead back to that place, or set dataloader_drop_last=True.",
    )


def _main_failed(reason: str) -> TaskError:
    return TaskError(
        "The main process was to read a batch for this one.", f"It failed: {reason}", "See the main process's error."
    )
