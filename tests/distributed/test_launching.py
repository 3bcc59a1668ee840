"""`hftrain.launch`: real processes from within this one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows

from hftrain import StrategyError, Trainer, TrainerCallback, launch
from hftrain.strategies.ddp import DDPStrategy

pytestmark = pytest.mark.distributed


def train(folder: str, *, fails_on: int | None = None) -> list[float]:
    trainer = Trainer(Net(), make_arguments(Path(folder), max_steps=3), train_dataset=make_rows(16), strategy="ddp")
    try:
        trainer.train()
        if trainer.strategy.rank == fails_on:
            raise ValueError("something of the user's")
    finally:
        trainer.strategy.close()
    return [trainer.strategy.world_size, *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)]


def test_launch_trains_on_two_processes_and_leaves_this_one_as_it_was(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}, dict(os.environ)
    first, second = launch(train, str(tmp_path), num_processes=2)
    assert first == second
    assert first[0] == 2
    assert len(first) == 4
    assert before == ({number: signal.getsignal(number) for number in before[0]}, dict(os.environ))


def num_accelerated(folder: str) -> list[int]:
    trainer = Trainer(Net(), make_arguments(Path(folder), max_steps=1), train_dataset=make_rows(8))
    return [trainer.accelerator.num_processes, trainer.accelerator.process_index]


def test_accelerator_used_in_this_process_does_not_stop_a_launch(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    try:
        assert num_accelerated(str(tmp_path)) == [1, 0]
        assert launch(num_accelerated, str(tmp_path), num_processes=2) == [[2, 0], [2, 1]]
        assert accelerate.PartialState().num_processes == 1
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_launch_raises_with_the_failing_rank_and_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"(?s)rank 1 failed.*something of the user's"):
        launch(train, str(tmp_path), num_processes=2, fails_on=1)


class Act(TrainerCallback):
    """Call a function after the first step, in one process while the other waits for it."""

    def __init__(self, rank: int, function: Callable[[], None]) -> None:
        self.rank, self.function = rank, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == str(self.rank) and state.global_step == 1:
            self.function()


def train_with(strategy: Any, folder: str, *callbacks: Any) -> None:
    args = make_arguments(Path(folder), save_strategy="steps")
    Trainer(Net(), args, train_dataset=make_rows(16), strategy=strategy, callbacks=callbacks).train()


def fail() -> None:
    raise ValueError("something of the user's")


@pytest.mark.parametrize("rank", [0, 1])
def test_launch_names_the_rank_that_failed_and_not_the_one_that_noticed(tmp_path: Path, rank: int) -> None:
    with pytest.raises(StrategyError) as caught:
        launch(train_with, None, str(tmp_path), Act(rank, fail), num_processes=2)
    assert f"The process of rank {rank} failed: Traceback" in str(caught.value)
    assert "\nValueError: something of the user's\n" in str(caught.value)


def interrupt_the_launcher() -> None:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(3)  # the launcher passes it on


def test_interrupting_the_launcher_saves_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        launch(train_with, None, str(tmp_path), Act(0, interrupt_the_launcher), num_processes=2)
    (saved,) = tmp_path.glob("checkpoint-*")
    assert saved.name < "checkpoint-4"  # that of the end


def fail_in_turn(folder: str) -> None:
    """Fail, rank 1 before rank 0; the clock of files goes back by an hour in between."""
    rank, write = int(os.environ["RANK"]), Path.write_text
    flags = [Path(folder, "0"), Path(folder, "1")]

    def wait(flag: Path) -> None:
        while not flag.exists():
            time.sleep(0.01)

    def note(path: Path, text: str, **options: Any) -> int:
        size = write(path, text, **options)
        os.utime(path, (10_000 + 3600 * rank,) * 2)  # a stand-in: the system's clock cannot be set here
        flags[rank].touch()
        wait(flags[1 - rank])  # so that the launcher ends neither before its note is written
        return size

    Path.write_text = note  # type: ignore[method-assign,assignment]
    if rank == 0:
        wait(flags[1])
    raise ValueError(f"of rank {rank}")


def test_launch_names_the_first_failure_although_the_clock_went_back(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"(?s)process of rank 1 failed: .*ValueError: of rank 1"):
        launch(fail_in_turn, str(tmp_path), num_processes=2)


def test_strategy_that_was_made_before_the_launch_is_refused_instead_of_waiting(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="It was made before the processes were launched"):
        launch(train_with, DDPStrategy(use_cpu=True), str(tmp_path), num_processes=2)
