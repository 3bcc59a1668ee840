"""Two real processes save together."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.manifest import verify
from hftrain.core.errors import CheckpointError


class Pair:
    """A group on torch.distributed."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0

    def all_true(self, flag: bool) -> bool:
        agreed = torch.tensor(int(flag))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed)


def save_together(output_dir: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    group = Pair()
    manager = CheckpointManager(Path(output_dir), group=group)
    answers: dict[str, Any] = {}

    def own(folder: Path) -> None:
        (folder / f"rng_state_{group.rank}.pth").write_text(str(group.rank))

    def main(folder: Path) -> None:
        (folder / "main").write_text(str(group.rank))

    def writers(each: Any) -> list[Any]:
        return [each, main] if group.rank == 0 else [each]

    def fail(rank: int) -> Any:
        def write(folder: Path) -> None:
            own(folder)
            if group.rank == rank:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return write

    path = manager.save(5, writers(own), facts={})
    answers["files"] = sorted(verify(path).files)
    for rank in (0, 1):
        try:
            manager.save(10, writers(fail(rank)), facts={})
        except CheckpointError as error:
            answers[f"rank {rank} fails"] = [str(error), type(error.__cause__).__name__, sorted(os.listdir(output_dir))]
        dist.barrier()
    answers["next"] = sorted(verify(manager.save(10, writers(own), facts={})).files)
    dist.destroy_process_group()
    return answers


@pytest.mark.distributed
def test_two_ranks_commit_together_and_fail_together(run_distributed, tmp_path):
    answers = run_distributed(save_together, output_dir=str(tmp_path / "out"))
    for rank, answer in enumerate(answers):
        assert answer["files"] == answer["next"] == ["main", "rng_state_0.pth", "rng_state_1.pth"]
        for failing in (0, 1):
            text, cause, names = answer[f"rank {failing} fails"]
            assert cause == ("OSError" if rank == failing else "NoneType")
            assert ("No space left" if rank == failing else "Another process failed") in text
            assert names == ["checkpoint-5"]
