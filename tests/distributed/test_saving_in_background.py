"""Two processes write a checkpoint while they train on, and agree without meeting."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, assert_same, outcome
from support.tiny import SHARINGS, make_resumable, make_rows
from support.writes import At, same_files

from hftrain import CheckpointError, SavePolicy
from hftrain.checkpoint.manifest import list_checkpoints, verify
from hftrain.extras.background import HostCopies
from hftrain.storage import files

pytestmark = pytest.mark.distributed


def make_trainer(
    folder: Path, *callbacks: Any, save_async: bool = True, on_full_disk: Any = "warn", **options: Any
) -> Any:
    policy = SavePolicy(save_async=save_async, on_full_disk=on_full_disk)
    options = {"max_steps": 12, "logging_steps": 5, **options}
    return make_resumable(folder, *callbacks, train_dataset=make_rows(48), save_policy=policy, **options)


def slow_down(seconds: float) -> None:
    """Let every flush of this process take time, so that its writes last for many steps."""
    flush = files.fsync_tree

    def slow(folder: Path) -> None:
        time.sleep(seconds)
        flush(folder)

    files.fsync_tree = slow


def save_both_ways(root: str, strategy: str) -> Any:
    folder, rank = Path(root), int(os.environ["RANK"])
    make_trainer(folder / "now", At(3, 7), save_async=False, **SHARINGS[strategy]).train()
    if rank:
        slow_down(0.2)
    steps = At(3, 7)
    whole = make_trainer(folder / "later", steps, **SHARINGS[strategy])
    sizes: set[int] = set()
    make = HostCopies._allocate

    def note(self: HostCopies, like: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
        sizes.add(like.numel())
        return make(self, like, is_pinned=is_pinned)

    HostCopies._allocate = note  # type: ignore[method-assign]
    whole.train()
    HostCopies._allocate = make  # type: ignore[method-assign]
    stopped = make_trainer(folder / "parts", At(3), StopAt(5), **SHARINGS[strategy])
    stopped.train()
    resumed = make_trainer(folder / "parts", **SHARINGS[strategy])
    resumed.train(resume_from_checkpoint=True)
    if strategy == "ddp":
        assert_same(outcome(resumed), outcome(whole))
        # Only the process that writes model and optimizer takes memory for them.
        largest = max(parameter.numel() for parameter in whole.model.parameters())
        assert (largest in sizes) == (rank == 0)
    return steps.told


@pytest.mark.parametrize("strategy", SHARINGS)
def test_processes_write_the_same_files_in_the_background(tmp_path: Path, run_distributed: Any, strategy: str) -> None:
    told = run_distributed(save_both_ways, root=str(tmp_path), strategy=strategy)
    # At the same steps, although one of them is slow; and the write outlasts the step it is of.
    assert told[0] == told[1]
    assert [saved for saved, _ in told[0]] == [3, 7, 12]
    assert told[0][0][1] > 3
    assert [path.name for path in list_checkpoints(tmp_path / "later")] == [
        "checkpoint-3",
        "checkpoint-7",
        "checkpoint-12",
    ]
    same_files(tmp_path / "later", tmp_path / "now")
    same_files(tmp_path / "parts" / "checkpoint-12", tmp_path / "now" / "checkpoint-12")
    for path in list_checkpoints(tmp_path / "later"):
        verify(path)


def fail_in_turn(root: str, number: int, failing: int, on_full_disk: str) -> Any:
    folder, rank = Path(root), int(os.environ["RANK"])
    flush = files.fsync_tree

    def fail(where: Path) -> None:
        flush(where)
        if rank == failing and any(where.parent.glob(".staging-*-checkpoint-4")):
            time.sleep(0.2)
            raise OSError(number, os.strerror(number))

    files.fsync_tree = fail
    # Steps that take time: an error that waited for the end would be seen to.
    steps = At(2, 4, do={step: lambda: time.sleep(0.1) for step in range(5, 12)})
    try:
        make_trainer(folder, steps, on_full_disk=on_full_disk).train()
    except CheckpointError as error:
        return [steps.step, type(error).__name__, "Another process failed" in str(error)]
    return [steps.step, [saved for saved, _ in steps.told]]


@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_process_ends_all_at_one_step(tmp_path: Path, run_distributed: Any, failing: int) -> None:
    ended = run_distributed(fail_in_turn, root=str(tmp_path), number=errno.EIO, failing=failing, on_full_disk="warn")
    steps = [step for step, *_ in ended]
    assert steps[0] == steps[1]
    assert 4 < steps[0] < 12
    assert [is_elsewhere for _, _, is_elsewhere in ended] == [failing == 1, failing == 0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoint-2"]


def test_full_disk_of_one_process_costs_all_one_checkpoint(tmp_path: Path, run_distributed: Any) -> None:
    ended = run_distributed(fail_in_turn, root=str(tmp_path), number=errno.ENOSPC, failing=1, on_full_disk="warn")
    assert ended == [[12, [2, 12]]] * 2
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-12"]
