"""Checkpoints that an earlier version wrote: today's code resumes them to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.kept import NUM_PROCESSES, RUNS, resume

OF_GUESTS = {"adapters": "peft", "transformers": "transformers"}


@pytest.mark.parametrize("name", [name for name in RUNS if name not in {**NUM_PROCESSES, **OF_GUESTS}])
def test_kept_checkpoint_resumes_to_the_bit(tmp_path: Path, name: str) -> None:
    resume(name, str(tmp_path))


@pytest.mark.distributed
@pytest.mark.parametrize("name", NUM_PROCESSES)
def test_kept_shards_resume_to_the_bit(run_distributed: Callable[..., Any], tmp_path: Path, name: str) -> None:
    run_distributed(resume, num_processes=2, name=name, folder=str(tmp_path))


@pytest.mark.interop
@pytest.mark.parametrize("name", OF_GUESTS)
def test_kept_checkpoint_of_a_guest_resumes(tmp_path: Path, name: str) -> None:
    pytest.importorskip(OF_GUESTS[name])
    resume(name, str(tmp_path))
