"""G2: resume is bit-exact, at any step, any number of times.

Each case trains undisturbed, and in three parts A -> B -> C that are stopped, saved and resumed; B saves on its way.
The dataset draws random numbers of three kinds, the model drops out, and the last window of an epoch is short.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import check_resumes
from support.stateful import StatefulRows, StatefulStream, disturbed
from support.tiny import Net, make_rows, make_trainer, on_tensor_ranks
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hftrain import Trainer, set_seed

Row = dict[str, torch.Tensor]

# 7 batches a pass for one rank, 4 for each of two.
NUM_ROWS = 26


class Rows(Dataset[Row]):
    def __init__(self) -> None:
        self.rows = make_rows(NUM_ROWS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return disturbed(self.rows[index])


class Stream(IterableDataset[Row]):
    """A stream without a length, and random in each sample and in its order, with a memory of what it drew."""

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        buffer: list[Row] = []
        for row in make_rows(NUM_ROWS)[slice(None) if worker is None else slice(worker.id, None, worker.num_workers)]:
            buffer.append(row)
            if len(buffer) == 5:
                yield disturbed(buffer.pop(int(torch.randint(5, ()))))
        yield from map(disturbed, buffer)


DATA: dict[str, Callable[[], Any]] = {
    "map": Rows,
    "stream": Stream,
    "stateful_map": lambda: StatefulRows(NUM_ROWS),
    "stateful_stream": lambda: StatefulStream(NUM_ROWS),
    "endless_stream": lambda: StatefulStream(NUM_ROWS, starts_over=False),
}


def steps_per_epoch(*, data: str, workers: int, accumulation: int, ranks: int) -> int:
    """Count the steps of a pass; each of two workers has its own last batch."""
    num_batches = {1: 8 if workers and "stream" in data else 7, 2: 4}[ranks]
    return -(-num_batches // accumulation)


def make(folder: Path, *callbacks: Any, **case: Any) -> Trainer:
    set_seed(1)
    trainer: Trainer = make_trainer(
        folder, Net(dropout=0.2), *callbacks, train_dataset=DATA[case["data"]](),
        strategy=on_tensor_ranks() if case.get("mesh") else None, max_steps=3 * case["steps"], logging_steps=3,
        save_strategy="steps", save_steps=2, bf16=case["precision"] == "bf16",
        gradient_accumulation_steps=case["accumulation"], dataloader_num_workers=case["workers"],
        dataloader_persistent_workers=case.get("persistent", False),
    )  # fmt: skip
    return trainer


def check(folder: Path, *, ranks: int = 1, where: Sequence[str] = ("middle", "end", "later"), **case: Any) -> None:
    """Stop within two epochs, or at their ends, or early in the second and third; compare with one run."""
    steps = case["steps"] = steps_per_epoch(
        data=case["data"], workers=case["workers"], accumulation=case["accumulation"], ranks=ranks
    )
    middle = max(steps // 2, 1)
    stops = {"middle": (middle, steps + middle), "end": (steps, 2 * steps), "later": (steps + 1, 2 * steps + 1)}
    for place in where:
        check_resumes(partial(make, **case), folder / place, stops[place])


MATRIX = [
    {"data": data, "workers": workers, "accumulation": accumulation, "precision": precision}
    for data, workers, accumulation, precision in itertools.product(DATA, (0, 2), (1, 3), ("fp32", "bf16"))
]
PERSISTENT = [
    {"data": data, "workers": 2, "persistent": True, "accumulation": accumulation, "precision": "fp32"}
    for data, accumulation in itertools.product(sorted(set(DATA) - {"stateful_map"}), (1, 3))
]
# Each pair of a kind of data and a value of another column.
SHORT = [
    {"data": data, "workers": workers, "accumulation": accumulation, "precision": precision, "where": where, **more}
    for data, workers, accumulation, precision, where, more in (
        ("map", 0, 3, "bf16", ["middle"], {}),
        ("map", 2, 1, "fp32", ["end"], {"persistent": True}),
        ("map", 2, 3, "fp32", ["later"], {}),
        ("stream", 0, 1, "bf16", ["middle", "end"], {}),
        ("stream", 2, 3, "fp32", ["later"], {}),
        ("stream", 2, 1, "fp32", ["middle"], {"persistent": True}),
        ("stateful_map", 0, 1, "fp32", ["later"], {}),
        ("stateful_map", 2, 3, "bf16", ["middle", "end"], {}),
        ("stateful_stream", 0, 3, "fp32", ["end", "later"], {}),
        ("stateful_stream", 2, 1, "bf16", ["middle"], {}),
        ("stateful_stream", 2, 3, "fp32", ["end", "later"], {"persistent": True}),
        ("endless_stream", 0, 1, "fp32", ["end", "later"], {}),
    )
]
SHORT_OF_RANKS = [
    {"data": data, "workers": workers, "accumulation": accumulation, "precision": precision, "where": where}
    for data, workers, accumulation, precision, where in (
        ("map", 2, 1, "bf16", ["middle"]),
        ("stream", 0, 3, "fp32", ["later"]),
        ("stateful_stream", 2, 1, "fp32", ["middle"]),
        ("stateful_stream", 0, 1, "fp32", ["end"]),
    )
]


def name_of(case: dict[str, Any]) -> str:
    words = (value if isinstance(value, (str, list)) else f"{name}={value}" for name, value in case.items())
    return "-".join(word if isinstance(word, str) else "-".join(word) for word in words)


@pytest.mark.parametrize("case", SHORT, ids=name_of)
def test_resume_is_exact(tmp_path: Path, case: dict[str, Any]) -> None:
    check(tmp_path, **case)


@pytest.mark.guarantees
@pytest.mark.parametrize("case", [*MATRIX, *PERSISTENT], ids=name_of)
def test_resume_is_exact_in_the_whole_matrix(tmp_path: Path, case: dict[str, Any]) -> None:
    check(tmp_path, **case)


def check_ranks(cases: list[dict[str, Any]], folder: str) -> int:
    """Run cases one after another on the ranks that were launched."""
    for number, case in enumerate(cases):
        check(Path(folder) / str(number), ranks=1 if case.get("mesh") else 2, **case)
    return len(cases)


@pytest.mark.distributed
def test_resume_of_two_ranks_is_exact(run_distributed: Any, tmp_path: Path) -> None:
    results = run_distributed(check_ranks, cases=SHORT_OF_RANKS, folder=str(tmp_path))
    assert results == [len(SHORT_OF_RANKS)] * 2


@pytest.mark.guarantees
@pytest.mark.distributed
def test_resume_of_two_tensor_ranks_is_exact(run_distributed: Any, tmp_path: Path) -> None:
    cases = [{**case, "mesh": True} for case in SHORT_OF_RANKS]
    assert run_distributed(check_ranks, cases=cases, folder=str(tmp_path)) == [len(cases)] * 2


@pytest.mark.guarantees
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_of_two_ranks_is_exact_in_the_whole_matrix(
    run_distributed: Any, tmp_path: Path, data: str, workers: int
) -> None:
    cases = [case for case in [*MATRIX, *PERSISTENT] if (case["data"], case["workers"]) == (data, workers)]
    results = run_distributed(check_ranks, cases=cases, folder=str(tmp_path), timeout_s=1500.0)
    assert results == [len(cases)] * 2
