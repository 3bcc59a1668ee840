"""Streams of `datasets` have a state: a run goes on from it, without reading what was read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets")

import torch  # noqa: E402
from support.resuming import StopAt, assert_same, check_resumes, outcome  # noqa: E402
from support.stateful import disturbed  # noqa: E402
from support.tiny import make_resumable, make_rows  # noqa: E402

from hftrain import Trainer  # noqa: E402

pytestmark = pytest.mark.interop

NUM_ROWS = 26
READ = "read.txt"


def count(row: dict[str, Any]) -> dict[str, Any]:
    with Path(READ).open("a") as file:
        file.write(".")
    tensors = {"x": torch.tensor(row["x"]), "labels": torch.tensor(row["labels"])}
    return {name: value.tolist() for name, value in disturbed(tensors).items()}


def make_stream(*, is_shuffled: bool) -> Any:
    rows = [{"x": row["x"].tolist(), "labels": int(row["labels"])} for row in make_rows(NUM_ROWS)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
    return (stream.shuffle(seed=1, buffer_size=6) if is_shuffled else stream).map(count)


def make(folder: Path, *callbacks: Any, workers: int = 0, is_shuffled: bool = False, data: Any = None) -> Trainer:
    Path(READ).write_text("")
    data = make_stream(is_shuffled=is_shuffled) if data is None else data
    options = {"train_dataset": data, "max_steps": 18, "dataloader_num_workers": workers}
    trainer: Trainer = make_resumable(folder, *callbacks, **options)
    return trainer


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stops", [(5, 11), (7, 8)])
def test_stream_of_datasets_goes_on_exactly(
    tmp_path: Path, tmp_cwd: Path, workers: int, is_shuffled: bool, stops: tuple[int, int]
) -> None:
    check_resumes(partial(make, workers=workers, is_shuffled=is_shuffled), tmp_path, stops)


def generate() -> Iterator[dict[str, Any]]:
    for row in make_rows(NUM_ROWS):
        yield {name: value.tolist() for name, value in disturbed(row).items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_of_a_random_generator_function_goes_on_exactly(tmp_path: Path, tmp_cwd: Path, workers: int) -> None:
    def data() -> Any:
        stream = datasets.IterableDataset.from_generator(generate)
        return datasets.concatenate_datasets([stream.map(count), make_stream(is_shuffled=False)])

    check_resumes(lambda folder, *callbacks: make(folder, *callbacks, workers=workers, data=data()), tmp_path, [5, 9])


@pytest.mark.skipif(int(datasets.__version__.partition(".")[0]) < 5, reason="states of older streams are not exact")
def test_stream_of_datasets_reads_nothing_again(tmp_path: Path, tmp_cwd: Path) -> None:
    make(tmp_path, StopAt(5)).train()
    make(tmp_path, StopAt(7)).train(resume_from_checkpoint=True)
    # Two batches, of 4 and of the 2 that are left.
    assert len(Path(READ).read_text()) == 6


def test_run_anew_after_a_resumed_one_begins_at_the_start(tmp_path: Path, tmp_cwd: Path) -> None:
    whole, data = make(tmp_path / "whole"), make_stream(is_shuffled=False)
    whole.train()
    make(tmp_path / "parts", StopAt(3)).train()
    make(tmp_path / "parts", StopAt(6), data=data).train(resume_from_checkpoint=True)
    anew = make(tmp_path / "anew", data=data)
    anew.train()
    assert_same(outcome(anew), outcome(whole))
