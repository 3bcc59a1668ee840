"""Data of grain and WebDataset: a run is killed in two passes and goes on with the same samples, or is told why not."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, assert_same, outcome
from support.tiny import Net, make_arguments, make_rows
from torch.utils.data import IterableDataset

from hftrain import Trainer, set_seed

pytestmark = [
    pytest.mark.interop,
    # WebDataset's files, in passes that end early.
    pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS = make_rows(26)


def train(folder: Path, dataset: Any, stop: int | None = None, *, resume: bool = False, workers: int) -> dict[str, Any]:
    set_seed(1)
    args = make_arguments(
        folder, max_steps=21, save_strategy="steps", save_steps=1000, dataloader_num_workers=workers
    )  # fmt: skip
    is_loader = callable(dataset)
    kind = type("Own", (Trainer,), {"get_train_dataloader": dataset}) if is_loader else Trainer
    data = None if is_loader else dataset
    trainer = kind(Net(dropout=0.2), args, train_dataset=data, callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def check_resumes(folder: Path, make: Any, *, workers: int = 0) -> None:
    whole = train(folder / "whole", make(), workers=workers)
    for stop in (3, 9):  # in the first pass and in the second
        train(folder / "parts", make(), stop, resume=stop > 3, workers=workers)
    assert_same(train(folder / "parts", make(), resume=True, workers=workers), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_grain_by_index_goes_on_exactly(tmp_path: Path, workers: int) -> None:
    grain = pytest.importorskip("grain")
    check_resumes(tmp_path, lambda: grain.MapDataset.source(ROWS).shuffle(seed=3), workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_grain_stream_goes_on_from_its_state(tmp_path: Path, workers: int) -> None:
    grain = pytest.importorskip("grain")

    class Stream(IterableDataset[Any]):
        def __init__(self) -> None:
            self.iterator, self.state = None, None

        def __iter__(self) -> Any:
            self.iterator = iter(grain.MapDataset.source(ROWS).shuffle(seed=3).to_iter_dataset())
            if self.state is not None:
                self.iterator.set_state(self.state)
                self.state = None
            yield from self.iterator

        def state_dict(self) -> dict[str, Any]:
            return {} if self.iterator is None else {"grain": self.iterator.get_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state.get("grain")

    check_resumes(tmp_path, Stream, workers=workers)


def write_shard(path: Path) -> None:
    with tarfile.open(path, "w") as shard:
        for number, row in enumerate(ROWS):
            data = io.BytesIO()
            torch.save(row, data)
            entry = tarfile.TarInfo(f"{number:04d}.pth")
            entry.size = data.tell()
            shard.addfile(entry, io.BytesIO(data.getvalue()))


def read(sample: Any) -> Any:
    return torch.load(io.BytesIO(sample["pth"]), weights_only=True)


class Shuffled(IterableDataset[Any]):
    """A WebDataset whose shuffling follows from the pass."""

    def __init__(self, path: Path) -> None:
        self.path, self.epoch = path, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        import webdataset

        shard = webdataset.WebDataset(str(self.path), shardshuffle=False)
        return iter(shard.shuffle(10, rng=random.Random(self.epoch)).map(read))


def test_webdataset_goes_on_exactly_if_its_order_follows_from_the_pass(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    path = tmp_path / "shard.tar"
    write_shard(path)
    check_resumes(tmp_path / "plain", lambda: webdataset.WebDataset(str(path), shardshuffle=False).map(read))
    check_resumes(tmp_path / "shuffled", lambda: Shuffled(path))


@pytest.mark.parametrize("workers", [0, 2])
def test_webloader_goes_on_exactly(tmp_path: Path, workers: int) -> None:
    webdataset = pytest.importorskip("webdataset")
    path = tmp_path / "shard.tar"
    write_shard(path)

    def get_train_dataloader(self: Trainer) -> Any:
        shard = webdataset.WebDataset(str(path), shardshuffle=False).map(read)
        return webdataset.WebLoader(shard, batch_size=4, collate_fn=self.data_collator)

    check_resumes(tmp_path, lambda: get_train_dataloader, workers=workers)
