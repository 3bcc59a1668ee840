"""G11: any step of a run with a flight log can be done again to the bit on the same hardware and versions."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from unit.cli.test_replay import SCRIPT, train

from hftrain.cli.replay import show_replay

CASES = [
    [],
    ["--workers", "2"],
    ["--accumulation", "3", "--dropout", "0.4"],
    ["--bf16"],
    ["--workers", "1", "--bf16", "--accumulation", "2"],
]


def replay_steps(home: Path, options: list[str], *, number: int, seed: int) -> None:
    (home / "train.py").write_text(SCRIPT)
    run, random = train(home, "run", *options), Random(seed)
    for count in range(number):
        step = random.randint(1, 20)
        answer = show_replay(run, step=step, output=str(home / f"again{count}"))
        assert answer.data["parted"] is None, (options, step, answer)


def test_a_random_step_of_a_run_is_done_again_to_the_bit(tmp_path: Path) -> None:
    replay_steps(tmp_path, CASES[-1], number=2, seed=0)


@pytest.mark.guarantees
@pytest.mark.parametrize("options", CASES, ids=" ".join)
def test_many_random_steps_of_runs_are_done_again_to_the_bit(tmp_path: Path, options: list[str]) -> None:
    replay_steps(tmp_path, options, number=40, seed=1)
