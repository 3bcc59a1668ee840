"""Dispatching: the main process reads and sends each rank its batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hftrain.core.errors import TaskError

# What a rank receives in each round: its batch, if any; whether this was the last round; the error, if any.
Parcel = tuple[list[Any], bool, str | None]


def takes_turns(loader: Any) -> bool:
    """Return whether ranks read batches in turn (rank r of W reads r, r + W, ...), not contiguous shares."""
    return isinstance(loader, DispatchLoader) or isinstance(getattr(loader, "dataset", None), IterableDataset)


class DispatchLoader:
    """Give rank r the batches r, r + W, ... of a loader that only the main process iterates.

    Reading a batch is collective: a round of batches, one for each rank, is sent when it is read. Batches may hold
    anything that can be pickled, and differ in shape. `drops_rest` drops a last round without a batch for every
    rank. Other attributes are those of the loader.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int, drops_rest: bool) -> None:
        self.loader = loader
        self.rank = rank
        self.world_size = world_size
        self.drops_rest = drops_rest

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.loader), self.world_size)
        return rounds + (self.rank < rest and not self.drops_rest)

    def __iter__(self) -> Iterator[Any]:
        # Started now, not at the first batch: the random state for the epoch's order is set at this point.
        return self._receive(iter(self.loader) if self.rank == 0 else iter(()))

    def with_loader(self, loader: Any) -> DispatchLoader:
        """Return a copy with another loader."""
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


def _scatter(parcels: list[Parcel] | None) -> Parcel:
    """Send each rank its parcel from the main process. Collective."""
    received: list[Any] = [None]
    torch.distributed.scatter_object_list(received, parcels, src=0)
    return received[0]  # type: ignore[no-any-return]


def _main_failed(reason: str) -> TaskError:
    return TaskError(
        "The main process was to read a batch for this one.", f"It failed: {reason}", "See the main process's error."
    )
