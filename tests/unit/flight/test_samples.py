"""The samples of streams, of a Mixture, and of data with a state: named in the flight log, and left out by that."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.resuming import assert_same, check_resumes, outcome
from support.stateful import Placed
from support.tiny import make_rows
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from unit.flight.test_flight import NUM_ROWS, SIZE, lines, make

from hftrain import ConfigError, Mixture, TaskError, Trainer
from hftrain.extras.flight.identities import hash_of

ROWS = make_rows(NUM_ROWS)
HASHES = [hash_of(row) for row in ROWS]


class Stream(IterableDataset[Any]):
    """Rows, of which each worker reads its share."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        return iter(ROWS if worker is None else ROWS[worker.id :: worker.num_workers])


class Counting(Dataset[Any]):
    """Map-style data with a state."""

    number = 0

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        self.number += 1
        return ROWS[index]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def batch_of_one(row: Any) -> Any:
    return {name: value[None] for name, value in row.items()}


def told(folder: Path) -> list[Any]:
    return [sample for line in lines(folder) for samples in line["samples"] for sample in samples]


@pytest.mark.parametrize("stream", [Stream, partial(Placed, ROWS)])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_streams_are_named_and_left_out_by_their_hash(tmp_path: Path, stream: Any, workers: int) -> None:
    run = partial(make, dataloader_num_workers=workers, max_steps=14)
    found = []
    for name in "ab":
        trainer = run(tmp_path / name, rows=stream(), flight_log=name == "a")
        trainer.train()
        found.append(outcome(trainer))
    assert_same(*found)
    assert set(told(tmp_path / "a")) == set(HASHES)
    excluded = [HASHES[4], HASHES[17]]
    run(tmp_path / "some", rows=stream(), exclude_samples=excluded).train()
    for whole, part in zip(lines(tmp_path / "a"), lines(tmp_path / "some"), strict=True):
        assert part["samples"] == [[each for each in samples if each not in excluded] for samples in whole["samples"]]
    assert set(told(tmp_path / "some")) == set(HASHES) - set(excluded)


@pytest.mark.parametrize("rows", [Stream, partial(Placed, ROWS), Counting])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_names_and_leaves_out_as_a_whole_one(tmp_path: Path, rows: Any, workers: int) -> None:
    excluded = [4, 17] if rows is Counting else [HASHES[4], HASHES[17]]
    run = partial(make, save_strategy="steps", save_steps=4, dataloader_num_workers=workers, max_steps=26)
    check_resumes(lambda folder, *stop: run(folder, *stop, rows=rows(), exclude_samples=excluded), tmp_path, [5, 18])
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert not set(excluded) & set(told(tmp_path / "whole"))


def test_samples_of_a_mixture_are_left_out_by_their_pair(tmp_path: Path) -> None:
    def mixture() -> Mixture:
        return Mixture({"a": make_rows(20), "b": make_rows(30)})

    make(tmp_path / "all", rows=mixture(), num_train_epochs=1).train()
    excluded = [[0, 3], [1, 3]]
    make(tmp_path / "some", rows=mixture(), num_train_epochs=1, exclude_samples=excluded).train()
    for whole, part in zip(lines(tmp_path / "all"), lines(tmp_path / "some"), strict=True):
        assert part["samples"] == [[each for each in samples if each not in excluded] for samples in whole["samples"]]
    assert len(told(tmp_path / "some")) < len(told(tmp_path / "all"))
    # A batch of one gets the next sample of the same set.
    options = {"per_device_train_batch_size": 1, "num_train_epochs": 1}
    make(tmp_path / "one", rows=mixture(), exclude_samples=excluded, **options).train()
    assert not {(0, 3), (1, 3)} & set(map(tuple, told(tmp_path / "one")))


@pytest.mark.parametrize(
    ("rows", "samples", "message"),
    [
        (Stream, [1], "hashes of their content"),
        (Counting, [HASHES[1]], "indices"),
        (lambda: Mixture({"a": make_rows(20), "b": make_rows(30)}), [1], "pairs"),
    ],
)
def test_names_of_another_kind_are_refused(tmp_path: Path, rows: Any, samples: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, rows=rows(), max_steps=3, exclude_samples=samples).train()


def test_a_batch_of_a_stream_with_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nothing left"):
        make(tmp_path, rows=Stream(), max_steps=3, exclude_samples=HASHES[:SIZE]).train()


def test_loaders_of_users_are_known_and_others_are_not(tmp_path: Path) -> None:
    class Own(Trainer):
        loader: Any

        def get_train_dataloader(self) -> Any:
            return self.loader

    for loader, known in (
        (DataLoader(ROWS, batch_size=SIZE), [0, 1, 2, 3]),
        (
            DataLoader(Stream(), batch_size=None, collate_fn=lambda row: {k: v[None] for k, v in row.items()}),
            HASHES[:1],
        ),
        ([batch_of_one(ROWS[0])], None),
    ):
        trainer = make(tmp_path, max_steps=1)
        trainer.__class__ = type("Mine", (Own,), {"loader": loader})
        trainer.train()
        assert lines(tmp_path)[0]["samples"] == [known]


def test_the_hash_depends_on_the_content_only() -> None:
    Image = pytest.importorskip("PIL.Image")
    picture = Image.new("L", (4, 4), 7)
    array = np.arange(6.0)
    samples = [
        {"x": torch.ones(2, 3)}, {"x": torch.ones(3, 2)}, {"x": torch.ones(6)}, {"y": torch.ones(6)}, {"x": array},
        {"x": array.astype(np.float32)}, {"x": [1, 2]}, {"x": [1, "2"]}, {"x": [torch.ones(2), 1]}, "text", b"text", 3,
        3.0, None, True, {"image": picture}, {"image": Image.new("L", (4, 4), 8)}, torch.ones(6, dtype=torch.bfloat16),
        torch.ones(6, dtype=torch.bool), (1, 2, "x"), {"x": {"y": 1}}, {"x": {"y": 2}},
    ]  # fmt: skip
    hashes = [hash_of(each) for each in samples]
    assert len(set(hashes)) == len(samples)
    assert None not in hashes
    assert hashes[0] == hash_of({"x": torch.ones(3, 2).T})
    cycle: list[Any] = [[]]
    cycle[0].append(cycle)
    assert [hash_of(each) for each in (lambda: 0, cycle, torch.eye(2).to_sparse())] == [None] * 3
