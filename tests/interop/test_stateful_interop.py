"""Streams of `datasets` have a state: a run goes on from it, without reading what was read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets")

import torch  # noqa: E402
from support.resuming import StopAt, assert_same, outcome  # noqa: E402
from support.stateful import disturbed  # noqa: E402
from support.tiny import Net, make_arguments, make_rows  # noqa: E402

from hftrain import Trainer, set_seed  # noqa: E402

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


def train(
    folder: Path, *, workers: int, is_shuffled: bool, stop: int | None = None, resume: bool = False, data: Any = None
) -> Trainer:
    Path(READ).write_text("")
    set_seed(1)
    arguments = make_arguments(
        folder, max_steps=18, save_strategy="steps", save_steps=1000, dataloader_num_workers=workers
    )
    data = make_stream(is_shuffled=is_shuffled) if data is None else data
    trainer = Trainer(Net(dropout=0.2), arguments, train_dataset=data, callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stops", [(5, 11), (7, 8)])
def test_stream_of_datasets_goes_on_exactly(
    tmp_path: Path, tmp_cwd: Path, workers: int, is_shuffled: bool, stops: tuple[int, int]
) -> None:
    options: dict[str, Any] = {"workers": workers, "is_shuffled": is_shuffled}
    whole = outcome(train(tmp_path / "whole", **options))
    train(tmp_path / "parts", **options, stop=stops[0])
    train(tmp_path / "parts", **options, stop=stops[1], resume=True)
    assert_same(outcome(train(tmp_path / "parts", **options, resume=True)), whole)


def generate() -> Iterator[dict[str, Any]]:
    for row in make_rows(NUM_ROWS):
        yield {name: value.tolist() for name, value in disturbed(row).items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_of_a_random_generator_function_goes_on_exactly(tmp_path: Path, tmp_cwd: Path, workers: int) -> None:
    def data() -> Any:
        stream = datasets.IterableDataset.from_generator(generate)
        return datasets.concatenate_datasets([stream.map(count), make_stream(is_shuffled=False)])

    options: dict[str, Any] = {"workers": workers, "is_shuffled": False}
    whole = outcome(train(tmp_path / "whole", **options, data=data()))
    train(tmp_path / "parts", **options, data=data(), stop=5)
    train(tmp_path / "parts", **options, data=data(), stop=9, resume=True)
    assert_same(outcome(train(tmp_path / "parts", **options, data=data(), resume=True)), whole)


@pytest.mark.skipif(int(datasets.__version__.partition(".")[0]) < 5, reason="states of older streams are not exact")
def test_stream_of_datasets_reads_nothing_again(tmp_path: Path, tmp_cwd: Path) -> None:
    train(tmp_path / "parts", workers=0, is_shuffled=False, stop=5)
    train(tmp_path / "parts", workers=0, is_shuffled=False, stop=7, resume=True)
    # Two batches, of 4 and of the 2 that are left.
    assert len(Path(READ).read_text()) == 6


def test_run_anew_after_a_resumed_one_begins_at_the_start(tmp_path: Path, tmp_cwd: Path) -> None:
    options: dict[str, Any] = {"workers": 0, "is_shuffled": False}
    whole = outcome(train(tmp_path / "whole", **options))
    train(tmp_path / "parts", **options, stop=3)
    data = make_stream(is_shuffled=False)
    train(tmp_path / "parts", **options, stop=6, resume=True, data=data)
    assert_same(outcome(train(tmp_path / "anew", **options, data=data)), whole)
