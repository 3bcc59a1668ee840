"""Data of grain and WebDataset: a run is killed in two passes and goes on with the same samples, or is told why not."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import check_resumes
from support.tiny import make_resumable, make_rows
from torch.utils.data import IterableDataset

from hftrain import Trainer

pytestmark = [
    pytest.mark.interop,
    # WebDataset's files, in passes that end early.
    pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS = make_rows(26)


def check(folder: Path, make: Any, *, workers: int = 0) -> None:
    """Stop in the first pass and in the second.

    Args:
        folder: Where the runs write.
        make: Returns a dataset, or a `get_train_dataloader` that needs none.
        workers: Of each loader.
    """

    def trainer(place: Path, *callbacks: Any) -> Trainer:
        data, kind = make(), Trainer
        if callable(data):
            data, kind = None, type("Own", (Trainer,), {"get_train_dataloader": data})
        made: Trainer = make_resumable(
            place, *callbacks, kind=kind, train_dataset=data, max_steps=21, dataloader_num_workers=workers
        )
        return made

    check_resumes(trainer, folder, [3, 9])


@pytest.mark.parametrize("workers", [0, 2])
def test_grain_by_index_goes_on_exactly(tmp_path: Path, workers: int) -> None:
    grain = pytest.importorskip("grain")
    check(tmp_path, lambda: grain.MapDataset.source(ROWS).shuffle(seed=3), workers=workers)


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

    check(tmp_path, Stream, workers=workers)


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
    check(tmp_path / "plain", lambda: webdataset.WebDataset(str(path), shardshuffle=False).map(read))
    check(tmp_path / "shuffled", lambda: Shuffled(path))


@pytest.mark.parametrize("workers", [0, 2])
def test_webloader_goes_on_exactly(tmp_path: Path, workers: int) -> None:
    webdataset = pytest.importorskip("webdataset")
    path = tmp_path / "shard.tar"
    write_shard(path)

    def get_train_dataloader(self: Trainer) -> Any:
        shard = webdataset.WebDataset(str(path), shardshuffle=False).map(read)
        return webdataset.WebLoader(shard, batch_size=4, collate_fn=self.data_collator)

    check(tmp_path, lambda: get_train_dataloader, workers=workers)
