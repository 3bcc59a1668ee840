"""Loaders of the user's own: with a state, and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, check_resumes
from support.stateful import Drawing, StatefulRows, StatefulStream
from support.tiny import Net, make_arguments, make_resumable, make_rows
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hftrain import ConfigError, Trainer

# Of torchdata 0.11, at torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

NUM_ROWS = 26


class Own(Trainer):
    make_loader: Callable[[], Any]

    def get_train_dataloader(self) -> Any:
        return self.make_loader()


def check(folder: Path, make_loader: Callable[[], Any], *, steps: int = 7) -> None:

    def make(place: Path, *callbacks: Any) -> Own:
        trainer: Own = make_resumable(place, *callbacks, kind=Own, max_steps=3 * steps, save_steps=1000)
        trainer.make_loader = make_loader
        return trainer

    check_resumes(make, folder / "within a pass", [3, steps + 2])
    check_resumes(make, folder / "at its end", [steps, 2 * steps])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [StatefulRows, StatefulStream])
def test_loader_of_torchdata_goes_on_exactly(
    tmp_path: Path, kind: Any, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    # The state of its workers holds no random numbers, which is said.
    draws = workers == 0
    is_stream = kind is StatefulStream
    check(
        tmp_path,
        lambda: StatefulDataLoader(
            kind(NUM_ROWS, draws=draws), batch_size=4, num_workers=workers, shuffle=None if is_stream else True
        ),
        steps=8 if workers and is_stream else 7,
    )
    assert ("does not include the random numbers of its workers" in caplog.text) == (not draws)


def test_loader_of_torchdata_seeks(tmp_path: Path) -> None:
    data = StatefulStream(NUM_ROWS)

    def train(stop: int | None, *, resume: bool = False) -> None:
        arguments = make_arguments(tmp_path, max_steps=6, save_strategy="steps", save_steps=1000)
        trainer = Own(Net(), arguments, train_dataset=data, callbacks=[StopAt(stop)])
        trainer.make_loader = lambda: StatefulDataLoader(data, batch_size=4)
        trainer.train(resume_from_checkpoint=resume)

    train(5)
    assert data.num_read == 20
    train(None, resume=True)
    assert data.num_read == 24


class Places:
    """Yields batches, knows its place, and has its own order that no epoch tells it."""

    def __init__(self) -> None:
        self.order = torch.Generator().manual_seed(3)
        self.rows = make_rows(28)
        self.place = 0
        self.now: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.get_state(), "place": self.place, "now": self.now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.set_state(state["order"])
        self.place, self.now = state["place"], state["now"]

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        if self.place == 0:
            self.now = torch.randperm(28, generator=self.order).tolist()
        while self.place < 7:
            self.place += 1
            rows = [self.rows[index] for index in self.now[4 * self.place - 4 : 4 * self.place]]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self.place = 0


def test_loader_of_any_kind_goes_on_from_its_state(tmp_path: Path) -> None:
    check(tmp_path, Places)


def test_plain_loader_with_workers_that_draw_numbers_goes_on_exactly(tmp_path: Path) -> None:
    check(tmp_path, lambda: DataLoader(Drawing(NUM_ROWS), batch_size=4, shuffle=True, num_workers=2))


class Counted(IterableDataset[Any]):
    """A stream whose position its own loader counts, with the signature of litdata's."""

    def __init__(self) -> None:
        self.rows, self.start = make_rows(NUM_ROWS), 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        return iter(self.rows[start:])

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, int]:
        return {"start": num_samples_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


class CountingLoader(DataLoader[Any]):
    num_read = start = 0

    def __iter__(self) -> Any:
        self.num_read, self.start = self.start, 0
        for batch in super().__iter__():
            self.num_read += len(batch["labels"])
            yield batch

    def state_dict(self) -> dict[str, Any]:
        dataset: Any = self.dataset
        return {"dataset": dataset.state_dict(self.num_read, 0, 4), "num_read": self.num_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dataset: Any = self.dataset
        dataset.load_state_dict(state["dataset"])
        self.start = state["num_read"]


def test_loader_that_counts_for_its_stream_goes_on_exactly(tmp_path: Path) -> None:
    check(tmp_path, lambda: CountingLoader(Counted(), batch_size=4))


def test_stream_whose_loader_counts_is_refused_without_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Override get_train_dataloader"):
        Trainer(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=Counted())
