"""The fixtures that start real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.distributed import DistributedRun

pytestmark = pytest.mark.distributed


def add_ranks(start: int) -> float:
    """Sum the ranks with a real collective."""
    torch.distributed.init_process_group("gloo")
    total = torch.tensor(float(start + torch.distributed.get_rank()))
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return total.item()


def test_run_distributed_returns_each_rank_s_answer(run_distributed: Callable[..., list[Any]]) -> None:
    assert run_distributed(add_ranks, 2, start=10) == [21.0, 21.0]


def test_run_distributed_runs_the_text_of_a_script(run_distributed: Callable[..., list[Any]]) -> None:
    script = "import os\nresult = [int(os.environ['RANK']), kwargs['word'], os.environ['OMP_NUM_THREADS']]"
    assert run_distributed(script, 2, word="yes") == [[0, "yes", "1"], [1, "yes", "1"]]


def test_launch_distributed_reports_a_rank_that_raises(launch_distributed: Callable[..., DistributedRun]) -> None:
    run = launch_distributed("import os\nassert os.environ['RANK'] == '0', 'rank one objects'\nresult = 'fine'")
    assert run.returncode
    assert "rank one objects" in run.output
    assert run.results[1] is None


def test_launch_distributed_kills_what_outlasts_its_time(launch_distributed: Callable[..., DistributedRun]) -> None:
    run = launch_distributed("import time\ntime.sleep(600)", timeout_s=8)
    assert run.returncode is None
    assert run.elapsed_s < 60


def test_launch_distributed_refuses_a_nested_function(launch_distributed: Callable[..., DistributedRun]) -> None:
    with pytest.raises(ValueError, match="top level"):
        launch_distributed(lambda: 1)
