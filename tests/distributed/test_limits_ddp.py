"""Two real processes read a part of the data: as many batches each, the same ones after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt
from support.tiny import Net, Reading, Stream, make_resumable, make_rows

pytestmark = pytest.mark.distributed


def train(folder: str, *, stops: list[int | None], is_stream: bool = False, **options: Any) -> dict[str, Any]:
    """Train, stop and go on; return what this rank read, and the weights."""
    seen: list[Any] = []
    rows = make_rows()
    for index, stop in enumerate(stops):
        trainer = make_resumable(
            Path(folder),
            StopAt(stop),
            model=Net(dropout=0.2),
            kind=Reading,
            train_dataset=Stream(rows) if is_stream else rows,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=3,
            limit_eval_batches=1,
            sanity_eval_batches=1,
            **options,
        )
        trainer.train(resume_from_checkpoint=bool(index))
        seen += trainer.seen
    metrics = trainer.evaluate(make_rows(20, seed=3))
    weights = [each.flatten().tolist() for each in trainer.model.parameters()]
    return {"seen": seen, "weights": weights, "loss": metrics["eval_loss"], "max_steps": trainer.state.max_steps}


@pytest.mark.parametrize(
    ("options", "per_pass"),
    [
        ({"limit_train_batches": 3}, 3),
        ({"limit_train_batches": 3, "is_stream": True}, 3),
    ],
)
def test_limited_run_on_two_ranks_resumes_exactly_twice(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any], per_pass: int
) -> None:
    whole = run_distributed(train, folder=str(tmp_path / "whole"), stops=[None], **options)
    parts = run_distributed(train, folder=str(tmp_path / "parts"), stops=[1, 4, None], **options)
    assert whole == parts
    assert whole[0]["weights"] == whole[1]["weights"]
    for each in whole:
        assert each["max_steps"] == 6
        assert len(each["seen"]) == 3 * per_pass
        assert (each["seen"][:per_pass] == each["seen"][per_pass : 2 * per_pass]) == ("is_stream" in options)
    assert not any(x in whole[1]["seen"][0] for x in whole[0]["seen"][0])
