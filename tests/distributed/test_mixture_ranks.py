"""A mixture on two processes: the draws of one, each once, also after two resumes and with other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resume.test_mixture import SIZES, Position, Stream, rows, train

pytestmark = pytest.mark.distributed


MAKERS = {"rows": rows, "Stream": Stream, "Position": Position}


def run(folder: str, *, make: str, stops: list[int | None], **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Train, stop and go on; return what this rank was trained on, and the last log."""
    seen: list[Any] = []
    for stop in stops:
        trainer, found = train(Path(folder), make=MAKERS[make], stop=stop, resume=bool(seen), **options)
        seen += map(list, found)
    logs = [line for line in trainer.state.log_history if "loss" in line][-1]
    return seen, {name: value for name, value in logs.items() if name.startswith("mixture")}


# Passes of whole batches: no rank is filled up.
CASES = [
    ("rows", {"kind": "changed", "dataloader_num_workers": 2, "epoch_size": 36}),
    ("rows", {"kind": "scheduled", "accelerator_config": {"dispatch_batches": True}, "epoch_size": 36}),
    ("Position", {"kind": "scheduled", "mode": "max_size_cycle"}),
]


@pytest.mark.parametrize(("make", "options"), CASES, ids=lambda each: each if isinstance(each, str) else each["kind"])
def test_two_ranks_share_the_draws_of_one(tmp_path: Path, run_distributed: Any, make: str, options: Any) -> None:
    half = {**options, "per_device_train_batch_size": 2}
    (first, logs), (second, _) = run_distributed(
        run, 2, folder=str(tmp_path / "whole"), make=make, stops=[None], **half
    )
    both = run_distributed(run, 2, folder=str(tmp_path / "parts"), make=make, stops=[3, 9, None], **half)
    assert [seen for seen, _ in both] == [first, second]
    assert both[0][1] == logs
    # Every update has the samples that it has on one process, which draws as many ahead.
    one, alone = run(str(tmp_path / "one"), make=make, stops=[None], **options)
    pairs = [first[at : at + 2] + second[at : at + 2] for at in range(0, len(first), 2)]
    assert [sample for pair in pairs for sample in pair][: len(one)] == one
    assert [logs[f"mixture_{name}_samples"] for name in SIZES] == [alone[f"mixture_{name}_samples"] for name in SIZES]
