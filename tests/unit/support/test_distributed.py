"""The fixtures that start real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.distributed import DistributedRun

pytestmark = pytest.mark.distributed


def test_launch_distributed_reports_a_rank_that_raises(launch_distributed: Callable[..., DistributedRun]) -> None:
    run = launch_distributed("import os\nassert os.environ['RANK'] == '0', 'rank one objects'\nresult = 'fine'")
    assert run.returncode
    assert "rank one objects" in run.output
    assert run.results[1] is None


def test_launch_distributed_kills_what_outlasts_its_time(launch_distributed: Callable[..., DistributedRun]) -> None:
    run = launch_distributed("import time\ntime.sleep(600)", timeout_s=8)
    assert run.returncode is None
    assert run.elapsed_s < 60
