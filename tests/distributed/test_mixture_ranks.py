"""A mixture on two processes: the draws of one, each once, also after two resumes and with other weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from resume.test_mixture import SIZES, Position, Stream, rows, train

pytestmark = pytest.mark.distributed


MAKERS = {"rows": rows, "Stream": Stream, "Position": Position}


def run(folder: str, *, make: str, stops: list[int | None], is_begun: bool = False, **options: Any) -> Any:
    """Train, stop and go on; return what this rank was trained on, and the last log."""
    seen: list[Any] = []
    for stop in stops:
        trainer, found = train(Path(folder), make=MAKERS[make], stop=stop, resume=is_begun or bool(seen), **options)
        seen += map(list, found)
        trainer.strategy.close()
    logs = [line for line in trainer.state.log_history if "loss" in line][-1]
    return seen, {name: value for name, value in logs.items() if name.startswith("mixture")}


def merged(first: list[Any], second: list[Any], size: int = 2) -> list[Any]:
    """Return the samples of two ranks in the order of the draws."""
    starts = range(0, len(first), size)
    return [sample for at in starts for sample in first[at : at + size] + second[at : at + size]]


# Passes of whole batches: no rank is filled up.
CASES = {
    "ddp": ("rows", {"kind": "changed", "dataloader_num_workers": 2, "epoch_size": 36, "strategy": "ddp"}),
    "fsdp": ("rows", {"kind": "changed", "epoch_size": 36, "strategy": "fsdp"}),
    "dispatch": ("rows", {"kind": "scheduled", "accelerator_config": {"dispatch_batches": True}, "epoch_size": 36}),
    "streams": ("Position", {"kind": "scheduled", "mode": "max_size_cycle", "strategy": "ddp"}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_share_the_draws_of_one(tmp_path: Path, run_distributed: Any, case: str) -> None:
    make, options = CASES[case]
    half = {**options, "per_device_train_batch_size": 2}
    (first, logs), (second, _) = run_distributed(
        run, 2, folder=str(tmp_path / "whole"), make=make, stops=[None], **half
    )
    both = run_distributed(run, 2, folder=str(tmp_path / "parts"), make=make, stops=[3, 9, None], **half)
    assert [seen for seen, _ in both] == [first, second]
    assert both[0][1] == logs
    # Every update has the samples that it has on one process, which draws as many ahead.
    alone = {**options, "strategy": "single"}
    one, counted = run(str(tmp_path / "one"), make=make, stops=[None], **alone)
    assert merged(first, second)[: len(one)] == one
    assert [logs[f"mixture_{name}_samples"] for name in SIZES] == [counted[f"mixture_{name}_samples"] for name in SIZES]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_read_different_samples_with_the_shares_of_all(
    tmp_path: Path, run_distributed: Any, strategy: str
) -> None:
    options = {"kind": "fixed", "mode": "max_size", "per_device_train_batch_size": 2, "strategy": strategy}
    (first, logs), (second, _) = run_distributed(
        run,
        2,
        folder=str(tmp_path),
        make="rows",
        stops=[None],
        num_train_epochs=1,
        dataloader_drop_last=True,
        **options,
    )
    pairs = Counter(map(tuple, first + second))
    assert set(pairs.values()) == {1}
    assert len(pairs) == 40
    counts = Counter(number for number, _ in first + second)
    assert [logs[f"mixture_{name}_samples"] for name in SIZES] == [counts[number] for number in range(3)]


@pytest.mark.parametrize(
    ("make", "sizes", "ranks"),
    [("rows", (4, 2), (1, 2)), ("Position", (2, 3), (2, 1)), ("Stream", (4, 2), (1, 2))],
    ids=str,
)
def test_other_number_of_ranks_continues_the_draws(
    tmp_path: Path, run_distributed: Any, make: str, sizes: tuple[int, int], ranks: tuple[int, int]
) -> None:
    options = {"kind": "fixed", "make": make, "max_steps": 14, "epoch_size": 100, "mode": "max_size_cycle"}
    whole, _ = run(str(tmp_path / "whole"), stops=[None], **{**options, "max_steps": 25})
    folder, seen = str(tmp_path / "parts"), []
    for number, size, stop in zip(ranks, sizes if ranks == (1, 2) else sizes[::-1], (5, 9), strict=True):
        part = {
            **options,
            "folder": folder,
            "per_device_train_batch_size": size,
            "is_begun": bool(seen),
            "stops": [stop],
        }
        found = run_distributed(run, number, **part) if number > 1 else [run(**part)]
        seen += merged(found[0][0], found[1][0], size) if number > 1 else found[0][0]
    assert seen == whole[: len(seen)]
