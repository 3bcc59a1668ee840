"""G11: any step of a run with a flight log can be done again to the bit, and what made it is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from hftrain.cli.bisect import show_bisect
from hftrain.cli.blame import show_blame
from hftrain.cli.replay import show_replay
from hftrain.extras.flight.reading import read_ledger

SCRIPT = Path(__file__).parents[1] / "support" / "flight_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
HFTRAIN = ["--no-python", sys.executable, "-c", "from hftrain.cli.commands import main; main()"]
# Each trains 20 steps and saves after 6, 12 and 18.
KINDS = [
    [],
    ["--workers", "2"],
    ["--accumulation", "3", "--dropout", "0.4"],
    ["--precision", "bf16"],
    ["--workers", "1", "--precision", "bf16", "--accumulation", "2"],
    ["--precision", "fp16"],
    ["--precision", "fp16", "--accumulation", "2", "--averaged"],
    ["--data", "stream"],
    ["--data", "stream", "--workers", "2"],
    ["--data", "stateful", "--dropout", "0.4"],
    ["--data", "stateful", "--workers", "2", "--accumulation", "2"],
    ["--data", "mixture"],
    ["--data", "mixture", "--workers", "2"],
    ["--averaged"],
]
# Stopped by a signal after a step, by max_steps, by both; then resumed.
STOPS = [
    (["--workers", "2"], 9, 20),
    (["--data", "stateful", "--workers", "1"], 8, 20),
    (["--data", "stream"], 13, 20),
    (["--precision", "fp16"], 10, 20),
    (["--accumulation", "2", "--averaged"], -1, 11),
    (["--data", "mixture"], 5, 20),
]


def train(home: Path, name: str, *options: str, stop_at: int = -1, flip_at: int = -1, ends: int = 0) -> str:
    words = [sys.executable, str(SCRIPT), name, *options]
    env = {**os.environ, "STOP_AT": str(stop_at), "FLIP_AT": str(flip_at)}
    done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    return str(home / name)


def train_in_two_sessions(home: Path, options: list[str], stop_at: int, max_steps: int) -> str:
    train(home, "run", *options, "--max-steps", str(max_steps), stop_at=stop_at, ends=143 if stop_at > 0 else 0)
    run = train(home, "run", *options, "--resume")
    assert sorted(read_ledger(run)) == list(range(1, 21))
    return run


def replay_steps(run: str, *, number: int, seed: int) -> None:
    random = Random(seed)
    for count in range(number):
        step = random.randint(1, 20)
        answer = show_replay(run, step=step, output=f"{run}-again{count}")
        assert answer.data["parted"] is None, (step, answer)


def replay_on_two(home: Path, strategy: str, steps: list[int], *options: str) -> None:
    def run(*words: str) -> str:
        return subprocess.run([*TORCHRUN, *words], cwd=home, check=True, capture_output=True, text=True).stdout

    run(str(SCRIPT), "run", "--strategy", strategy, *options)
    for step in steps:
        told = run(*HFTRAIN, "replay", "run", "--step", str(step), "-o", f"again{step}")
        assert "All steps since are the same to the bit." in told
        assert (home / f"again{step}" / "modules-rank1.json").exists()


def test_a_random_step_of_a_run_is_done_again_to_the_bit(tmp_path: Path) -> None:
    replay_steps(train(tmp_path, "run", *KINDS[4]), number=2, seed=0)


def test_steps_on_both_sides_of_a_resume_are_done_again_to_the_bit(tmp_path: Path) -> None:
    run = train_in_two_sessions(tmp_path, *STOPS[0])
    for step in (8, 11):
        assert show_replay(run, step=step, output=f"{run}-{step}").data["parted"] is None


def test_a_step_that_an_overflow_skipped_is_done_again_to_the_bit(tmp_path: Path) -> None:
    run = train(tmp_path, "run", "--precision", "fp16")
    skipped = [step for step, lines in read_ledger(run).items() if lines[0]["skipped"]]
    assert {10, 11} <= set(skipped) < set(range(1, 21))
    answer = show_replay(run, step=10, output=f"{run}-again")
    assert answer.data["parted"] is None
    assert answer.data["first_not_finite"].startswith("backward")


@pytest.mark.guarantees
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a spike first thing after a resume
@pytest.mark.parametrize("options", KINDS, ids=" ".join)
def test_many_random_steps_of_runs_are_done_again_to_the_bit(tmp_path: Path, options: list[str]) -> None:
    replay_steps(train(tmp_path, "run", *options), number=10, seed=1)


@pytest.mark.guarantees
@pytest.mark.parametrize(("options", "stop_at", "max_steps"), STOPS)
def test_many_random_steps_of_resumed_runs_are_done_again_to_the_bit(
    tmp_path: Path, options: list[str], stop_at: int, max_steps: int
) -> None:
    replay_steps(train_in_two_sessions(tmp_path, options, stop_at, max_steps), number=10, seed=2)


@pytest.mark.guarantees
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_random_steps_of_two_processes_are_done_again_to_the_bit(tmp_path: Path, strategy: str) -> None:
    replay_on_two(tmp_path, strategy, [5, 16], "--accumulation", "2", "--workers", "1", "--dropout", "0.4")


def test_a_corrupted_sample_is_named(tmp_path: Path) -> None:
    run = train(tmp_path, "run", "--corrupted", "17")
    answer = show_blame(run)
    assert answer.data["suspects"][0]["sample"] == 17
    assert {each["step"] for each in answer.data["spikes"]} <= set(answer.data["suspects"][0]["steps"])


def test_a_flipped_bit_of_a_gradient_is_named(tmp_path: Path) -> None:
    runs = [train(tmp_path, "base"), train(tmp_path, "flipped", "--flip", "13")]
    answer = show_bisect(runs, output=str(tmp_path / "a"))
    assert answer.data["step"] == 13
    assert {"gradients", "weights"} <= set(answer.data["differs"])
    assert not {"samples", "losses"} & set(answer.data["differs"])
    assert answer.data["where"] == "backward, the gradient of blocks.1.0.weight (Parameter)"


def test_a_bit_that_the_machine_has_flipped_is_named(tmp_path: Path) -> None:
    run, base = train(tmp_path, "run", flip_at=10), train(tmp_path, "base")
    assert show_replay(run, step=9, output=f"{run}-9").data["parted"] is None
    answer = show_replay(run, step=12, output=f"{run}-12")
    assert answer.data["parted"] == 10
    assert {"gradients", "weights"} <= set(answer.data["differs"])
    assert not {"samples", "losses"} & set(answer.data["differs"])
    compared = show_bisect([base, run], output=str(tmp_path / "a"))
    assert (compared.data["step"], compared.data["where"]) == (10, None)
    again = [line for line in compared if line.startswith("Done again")]
    assert len(again) == 1
    assert again[0].startswith(f"Done again, {run} is not the same: step 10: ")


def test_a_module_with_another_seed_is_named(tmp_path: Path) -> None:
    runs = [train(tmp_path, "base"), train(tmp_path, "other", "--head-seed", "5")]
    answer = show_bisect(runs, output=str(tmp_path / "a"))
    assert (answer.data["step"], answer.data["where"]) == (1, "forward, head (Linear)")
