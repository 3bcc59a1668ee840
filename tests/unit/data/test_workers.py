"""Loader workers that really die or hang while the run does something else."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.forked import run_cases
from support.tiny import Rows, make_resumable, make_rows

from hftrain import ConfigError, SavePolicy, StrategyError, TrainerCallback
from hftrain.checkpoint.layout import list_checkpoints
from hftrain.checkpoint.manifest import verify
from hftrain.storage import files

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no SIGCHLD")

LIMIT_S = 30.0


class Killer:
    """Kill a loader worker of this process once, and return when it is dead."""

    def __init__(self, name: str = "SIGKILL") -> None:
        self.name, self.is_done = name, False

    def __call__(self) -> None:
        if self.is_done:
            return
        self.is_done = True
        workers = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
        worker = min(workers, key=psutil.Process.create_time)  # one of the training, not of an evaluation
        worker.send_signal(signal.Signals[self.name])
        deadline_s = time.monotonic() + LIMIT_S
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, "the worker has not died"
            time.sleep(0.01)


class Kill(TrainerCallback):
    """Kill a worker at an event of the third step."""

    def __init__(self, event: str) -> None:
        self.kill = Killer()
        setattr(self, event, self._strike)

    def _strike(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 2:
            self.kill()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing; replaced on the instance."""

    on_prediction_step = on_optimizer_step


def killed(folder: Path, *callbacks: Any, **options: Any) -> str:
    """Train until the run ends because of the worker, and return what it says."""
    settings = {
        "max_steps": 40,
        "save_steps": 3,
        "dataloader_num_workers": 2,
        "train_dataset": make_rows(80),
        **options,
    }
    trainer = make_resumable(folder, *callbacks, **settings)
    with pytest.raises(StrategyError) as caught:
        trainer.train()
    return str(caught.value)


def steps_in(folder: Path) -> list[int]:
    return [verify(path).step for path in list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("SIGKILL", SavePolicy()),
        ("SIGBUS", SavePolicy(save_async=True)),
        ("SIGSEGV", SavePolicy(on_exception=True)),
    ],
)
def test_a_save_is_completed_though_a_worker_dies_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, policy: SavePolicy
) -> None:
    kill, flush = Killer(name), files.fsync_tree

    def fsync_tree(folder: Path) -> None:
        kill()
        flush(folder)

    monkeypatch.setattr(files, "fsync_tree", fsync_tree)
    message = killed(tmp_path / "run", save_policy=policy)
    assert re.match(
        rf"Loader worker [01] \(pid \d+\) ended with {name}\. Its oldest open batch has the samples", message
    )
    assert ("Memory is the likely cause" in message) == (name == "SIGKILL")
    assert ("/dev/shm" in message) == (name == "SIGBUS")
    assert ("dataloader_prefetch_factor" in message) == (name != "SIGSEGV")
    found = steps_in(tmp_path / "run")
    assert found[0] == 3


@pytest.mark.parametrize("event", ["on_optimizer_step", "on_prediction_step"])
def test_an_update_and_an_evaluation_are_completed_too(tmp_path: Path, event: str) -> None:
    kill = Kill(event)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3} if event == "on_prediction_step" else {}
    message = killed(tmp_path / "run", kill, eval_dataset=make_rows(7, seed=2), **options)
    assert kill.kill.is_done
    assert "ended with SIGKILL" in message
    assert steps_in(tmp_path / "run")[0] == 3


class Quitting(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            os._exit(3)
        return super().__getitem__(index)


def test_a_worker_that_quits_is_named_with_its_status(tmp_path: Path) -> None:
    message = killed(tmp_path / "run", train_dataset=Quitting(make_rows(80)))
    assert "ended with exit status 3. Its oldest open batch has the samples" in message
    assert "Set dataloader_num_workers=0 to see the error" in message


def test_the_handlers_are_put_back_and_one_of_the_program_is_left_alone(tmp_path: Path) -> None:
    options = {"max_steps": 2, "dataloader_num_workers": 1}
    make_resumable(tmp_path / "first", **options).train()
    theirs = signal.getsignal(signal.SIGCHLD)
    assert theirs.__module__ == "torch.utils.data._utils.signal_handling"
    heard: list[Any] = []
    own = lambda *_: heard.append(1)  # noqa: E731
    signal.signal(signal.SIGCHLD, own)
    try:
        make_resumable(tmp_path / "second", **options).train()
        assert signal.getsignal(signal.SIGCHLD) is own
        assert heard
    finally:
        signal.signal(signal.SIGCHLD, theirs)


class Hanging(Rows):
    def __getitem__(self, index: int) -> Any:
        while index == 7:
            time.sleep(0.1)
        return super().__getitem__(index)


def test_a_worker_that_hangs_is_named_with_its_samples_and_its_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = killed(tmp_path / "run", train_dataset=Hanging(make_rows(80)), dataloader_timeout=4)
    assert re.search(
        r"Loader worker [01] \(pid \d+\) gave no batch in 4 s\. Its oldest open batch has the samples ", message
    )
    assert 7 in map(int, re.findall(r"\d+", message.partition("the samples ")[2].partition(".")[0]))
    assert "Its stack is printed above" in message
    assert f'File "{__file__}", line' in capfd.readouterr().err


def test_a_time_limit_needs_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataloader_timeout"):
        make_resumable(tmp_path, dataloader_timeout=3)


def killed_on_one_rank(folder: str) -> None:
    """Let a worker of the second rank die between the stages of a save."""
    kill, flush = Killer(), files.fsync_tree
    trainer = make_resumable(
        Path(folder), train_dataset=make_rows(80), max_steps=40, save_steps=3, dataloader_num_workers=1
    )

    def fsync_tree(path: Path) -> None:
        if trainer.strategy.rank == 1:
            kill()
        flush(path)

    files.fsync_tree = fsync_tree
    trainer.train()


@pytest.mark.distributed
def test_a_save_of_several_ranks_is_completed(tmp_path: Path) -> None:
    ((first, second),) = run_cases(killed_on_one_rank, tmp_path, [{"folder": str(tmp_path / "run")}], timeout_s=120)
    print(first.output, second.output)
    assert first.code != 0
    assert second.code != 0
    assert "ended with SIGKILL. Its oldest open batch has the samples" in second.output
    assert steps_in(tmp_path / "run")[0] == 3
