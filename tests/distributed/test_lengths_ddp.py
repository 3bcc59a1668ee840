"""Two real processes act at the same steps, though their clocks differ, and on the tokens of both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt
from support.tiny import Net, make_resumable, make_rows

from hftrain import TrainerCallback, set_seed
from hftrain.extras import intervals

pytestmark = pytest.mark.distributed


class Counted(Net):
    main_input_name = "x"


class Clock:
    """Slower on the main process than on the other."""

    def __init__(self) -> None:
        self.now_s, self.step_s = 0.0, 0.1

    def monotonic(self) -> float:
        return self.now_s


class Tick(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.now_s += self.clock.step_s


def train(folder: str, *, stops: list[int | None], **options: Any) -> dict[str, Any]:
    """Train, stop and go on; return when this rank evaluated and ended, and the weights."""
    clock = Clock()
    intervals.time = clock  # type: ignore[assignment,attr-defined]
    set_seed(3)
    first = Counted(dropout=0.2)
    for index, stop in enumerate(stops):
        trainer = make_resumable(
            Path(folder),
            StopAt(stop),
            Tick(clock),
            model=copy.deepcopy(first),
            train_dataset=make_rows(32),
            eval_strategy="steps",
            include_num_input_tokens_seen="all",
            **options,
        )
        clock.step_s = 0.1 * (1 + 5 * trainer.args.process_index)
        trainer.train(resume_from_checkpoint=bool(index))
    return {
        "evaluated": [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "end": trainer.state.global_step,
        "weights": [each.flatten().tolist() for each in trainer.model.parameters()],
    }


def test_ranks_agree_on_time(tmp_path: Path, run_distributed: Any) -> None:
    options = {"eval_steps": "2s", "max_time": "6s", "num_train_epochs": 50}
    for stops in ([None], [30, None]):
        both = run_distributed(train, folder=str(tmp_path / str(len(stops))), stops=stops, **options)
        assert both[0] == both[1]
        # 0.1 s a step, read about every second.
        assert 60 <= both[0]["end"] <= 80
        assert len(both[0]["evaluated"]) >= 3


@pytest.mark.parametrize(("steps", "expected"), [("128tok", [4, 8, 12]), ("0.5ep", [2, 4, 6, 8, 10, 12])])
def test_ranks_count_together_and_resume_exactly_twice(
    tmp_path: Path, run_distributed: Any, steps: str, expected: list[int]
) -> None:
    # Each update has 8 samples of 4 tokens.
    options = {"eval_steps": steps, "num_train_epochs": 3}
    whole = run_distributed(train, folder=str(tmp_path / "whole"), stops=[None], **options)
    assert whole[0]["evaluated"] == expected
    parts = run_distributed(train, folder=str(tmp_path / "parts"), stops=[3, 5, None], **options)
    assert parts == whole
