"""Data that can tell where it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from support.tiny import make_rows
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Row = dict[str, torch.Tensor]


def disturbed(row: Row) -> Row:
    """Add what three generators draw."""
    noise = torch.tensor([random.gauss(0, 1), *numpy.random.normal(size=2)], dtype=torch.float32)
    return {**row, "x": row["x"] + 0.1 * torch.cat([noise, torch.randn(1)])}


class StatefulStream(IterableDataset[Row]):
    """Shuffles with a buffer, and keeps buffer, place and a generator of its own in its state.

    Args:
        num: How many rows.
        starts_over: Whether an iteration begins anew unless a state was loaded, or goes on where the last one was.
        draws: Whether it draws from the global generators, too.
    """

    def __init__(self, num: int, *, starts_over: bool = True, draws: bool = True) -> None:
        self.rows = make_rows(num)
        self.draws = draws
        self.starts_over = starts_over
        self.num_read = 0
        self._resumed: Any = None
        self._own = random.Random(0)
        self._next, self._buffer = 0, list[int]()

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "buffer": list(self._buffer), "own": self._own.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._buffer = state["next"], list(state["buffer"])
        version, internal, gauss = state["own"]
        self._own.setstate((version, tuple(internal), gauss))
        self._resumed = True

    def __iter__(self) -> Iterator[Row]:
        if self.starts_over and not self._resumed:
            self._next, self._buffer = 0, []
        self._resumed = False
        worker = get_worker_info()
        mine = list(range(len(self.rows)))[
            slice(None) if worker is None else slice(worker.id, None, worker.num_workers)
        ]
        while self._next < len(mine) or self._buffer:
            while self._next < len(mine) and len(self._buffer) < 5:
                self._buffer.append(mine[self._next])
                self._next += 1
            place = self._own.randrange(5) + (int(torch.randint(5, ())) if self.draws else 0)
            row = self.rows[self._buffer.pop(place % len(self._buffer))]
            self.num_read += 1
            yield disturbed(row) if self.draws else row
        self._next = 0 if not self.starts_over else self._next


class Placed(IterableDataset[Any]):
    """Rows as a stream that saves its place, is split among workers, and counts what it reads."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.place, self.num_reads = rows, 0, 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = self.rows if worker is None else self.rows[worker.id :: worker.num_workers]
        while self.place < len(mine):
            self.place += 1
            self.num_reads += 1
            yield mine[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Lines(IterableDataset[Any]):
    """Knows its place only while it is read.

    Args:
        goes_on: Whether an iteration goes on where the last one was left.
        counts: Whether it counts its passes and adds hundred times their number.
    """

    line = first = passes = 0

    def __init__(self, rows: Any, *, goes_on: bool = False, counts: bool = False) -> None:
        self.rows, self.goes_on, self.counts, self.read = rows, goes_on, counts, list[int]()

    def state_dict(self) -> Any:
        return {"line": self.line, "passes": self.passes}

    def load_state_dict(self, state: Any) -> None:
        self.first, self.passes = state["line"], state["passes"]

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first or self.line * self.goes_on, 0
        for line in range(first, len(self.rows)):
            self.line = line + 1
            self.read.append(line)
            yield self.rows[line] + 100 * self.passes if self.counts else self.rows[line]
        if self.counts or self.goes_on:
            self.line, self.passes = 0, self.passes + 1


class StatefulRows(Dataset[Row]):
    """Map-style, with a counter of what each copy has given that the samples depend on.

    Args:
        num: How many rows.
        draws: Whether it draws from the global generators, too.
    """

    def __init__(self, num: int, *, draws: bool = True) -> None:
        self.rows = make_rows(num)
        self.draws = draws
        self.num_read = 0
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        self.num_read += 1
        self.given += 1
        row = disturbed(self.rows[index]) if self.draws else self.rows[index]
        return {**row, "x": row["x"] * (1 + 0.1 * (self.given % 7))}


class Drawing(Dataset[Row]):
    """Map-style, and random."""

    def __init__(self, num: int) -> None:
        self.rows = make_rows(num)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        self.num_read += 1
        return disturbed(self.rows[index])
