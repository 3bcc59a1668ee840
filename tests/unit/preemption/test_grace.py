"""SIGTERM for runs that stand still: what is said at once, what is saved, and how the process ends.

Each case is a process of its own that gets real signals, and ends as a script does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forked import Ended, run_cases
from support.tiny import make_resumable

from hftrain import ConfigError, SavePolicy, Trainer, TrainerCallback
from hftrain.checkpoint.manifest import list_checkpoints, verify
from hftrain.preemption import consensus, grace
from hftrain.storage import files

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows has no SIGTERM"),
]

STEP = 3
FOREVER_S = 60.0


class Log(logging.Handler):
    """Print what is logged, and tell when a text comes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.has_come = text, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)
        if self.text in record.getMessage():
            self.has_come.set()


def sleep() -> None:
    time.sleep(FOREVER_S)


def spin() -> None:
    while True:
        pass


def wait() -> None:
    threading.Event().wait()


def refuse() -> None:
    """Stand still, and swallow whatever is raised."""
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(FOREVER_S)


def lock_twice() -> None:
    """Wait in C code, which no signal ends."""
    mutex, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)


def work() -> None:
    """Get on: batches that are done one after the other."""
    time.sleep(0.15)


KINDS: dict[str, Callable[[], None]] = {each.__name__: each for each in (sleep, spin, wait, refuse, lock_twice, work)}


class Still(TrainerCallback):
    """Stand still at an event of a step, and be told to stop there."""

    def __init__(self, event: str, kind: str, step: int, num_signals: int, log: Log) -> None:
        self.kind, self.step, self.num_signals, self.log = kind, step, num_signals, log
        setattr(self, event, self.strike)

    def strike(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            if self.num_signals:
                threading.Thread(target=self.send, args=(self.num_signals,), daemon=True).start()
                self.num_signals = 0
            KINDS[self.kind]()

    def send(self, num_signals: int) -> None:
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGTERM)
            self.log.has_come.wait(10.0)
            time.sleep(grace._SAME_S + 0.1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing; one of these is replaced on the instance."""

    on_substep_end = on_prediction_step = on_pre_optimizer_step = on_train_end = on_epoch_begin = on_step_begin


def stand_still(
    event: str = "on_step_begin", kind: str = "sleep", num_signals: int = 1, step: int = STEP, **options: Any
) -> None:
    """Train, and end as the run does."""
    grace.LAST_S = 0.6 if kind in ("refuse", "lock_twice") else 5.0
    log = Log("SIGTERM: the run stops at the end of")
    logging.getLogger("hftrain").addHandler(log)
    policy = SavePolicy(**{"grace_s": 0.4, "on_exception": True, **options.pop("policy", {})})
    still = Still(event, kind, step, num_signals, log)
    trainer = make_resumable(Path("out"), still, save_policy=policy, max_steps=6, **options)
    print(f"pid {os.getpid()}", flush=True)
    if options.get("save_steps") == 1:
        stand_still_in_a_write(trainer, still)
    try:
        trainer.train()
        print("train() returned")
    finally:
        print("unwound", flush=True)


def stand_still_in_a_write(trainer: Trainer, still: Still) -> None:
    flush = files.fsync_tree

    def fsync_tree(folder: Path) -> None:
        still.strike(trainer.args, trainer.state, None)
        flush(folder)

    files.fsync_tree = fsync_tree


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Ended, Path]]:
    folder = tmp_path_factory.mktemp("grace")
    found = run_cases(stand_still, folder, list(CASES.values()), num_ranks=1, timeout_s=180)
    names = list(CASES)

    def get(name: str) -> tuple[Ended, Path]:
        index = names.index(name)
        (one,) = found[index]
        print(one.output)
        return one, folder / str(index) / "out"

    return get


CASES: dict[str, dict[str, Any]] = {
    "sleep": {},
    "spin": {"kind": "spin"},
    "lock": {"kind": "wait", "event": "on_pre_optimizer_step"},
    "swallowed": {"kind": "refuse"},
    "C": {"kind": "lock_twice"},
    "first step": {"step": 0},
    "evaluation": {"event": "on_prediction_step", "eval_strategy": "steps", "eval_steps": 3},
    "end": {"event": "on_train_end", "step": 6},
    "save": {"save_steps": 1, "event": "on_epoch_begin", "kind": "lock_twice", "policy": {"save_async": True}},
    "second": {"num_signals": 2, "policy": {"grace_s": None}},
    "slow step": {"kind": "work", "event": "on_substep_end", "gradient_accumulation_steps": 5},
    "slow evaluation": {
        "kind": "work", "event": "on_prediction_step", "eval_strategy": "steps", "eval_steps": 3,
        "per_device_eval_batch_size": 1,
    },
}  # fmt: skip


def steps_in(folder: Path) -> list[int]:
    return [verify(path).step for path in list_checkpoints(folder)]


@pytest.mark.parametrize("name", ["sleep", "spin", "second"])
def test_a_step_that_stands_still_is_interrupted_and_the_last_whole_step_saved(
    ended: Callable[[str], tuple[Ended, Path]], name: str
) -> None:
    one, folder = ended(name)
    assert one.code == 143
    assert "SIGTERM: the run stops at the end of train step 4, at s" in one.output
    assert f"SIGTERM interrupts train step 4, at {name if name == 'spin' else 'sleep'} ({__file__}:" in one.output
    reason = "a second SIGTERM came" if name == "second" else "nothing got on in 0."
    assert f"because {reason}" in one.output
    assert "unwound" in one.output
    assert "train() returned" not in one.output
    assert steps_in(folder) == [3]
    assert "The last checkpoint is checkpoint-3; 0 whole steps after it are lost" in one.output
    assert (folder / "requeue.json").exists()


def test_a_main_thread_that_waits_for_another_one_is_interrupted(
    ended: Callable[[str], tuple[Ended, Path]],
) -> None:
    one, folder = ended("lock")
    assert (one.code, steps_in(folder)) == (143, [3])
    assert "unwound" in one.output


@pytest.mark.parametrize("name", ["swallowed", "C"])
def test_a_process_that_cannot_be_interrupted_ends_all_the_same(
    ended: Callable[[str], tuple[Ended, Path]], name: str
) -> None:
    one, folder = ended(name)
    assert one.code == 143
    assert "unwound" not in one.output
    assert "SIGTERM ends the process at once: it is still in train step 4, at " in one.output
    assert "There is no checkpoint" in one.output
    assert steps_in(folder) == []


def test_nothing_is_saved_before_the_first_step(ended: Callable[[str], tuple[Ended, Path]]) -> None:
    one, folder = ended("first step")
    assert (one.code, steps_in(folder)) == (143, [])
    assert "SIGTERM interrupts train step 1, at sleep" in one.output
    assert not (folder / "requeue.json").exists()


def test_an_evaluation_that_stands_still_is_left_to_the_resumed_run(
    ended: Callable[[str], tuple[Ended, Path]],
) -> None:
    one, folder = ended("evaluation")
    assert "SIGTERM interrupts evaluate, at sleep" in one.output
    assert (one.code, steps_in(folder)) == (143, [3])
    assert verify(folder / "checkpoint-3").facts["left"] == ["evaluate"]


def test_a_callback_at_the_end_is_interrupted(ended: Callable[[str], tuple[Ended, Path]]) -> None:
    one, folder = ended("end")
    assert (one.code, steps_in(folder)) == (143, [6])
    assert "SIGTERM interrupts finish the training, at sleep" in one.output


@pytest.mark.parametrize(("name", "step"), [("slow step", 5), ("slow evaluation", 4)])
def test_what_gets_on_is_waited_for_however_long_it_takes(
    ended: Callable[[str], tuple[Ended, Path]], name: str, step: int
) -> None:
    one, folder = ended(name)
    assert one.code == 143
    assert f"SIGTERM stopped the training after step {step} of 6" in one.output
    assert "interrupts" not in one.output
    assert steps_in(folder) == [step]


def test_a_background_write_under_way_is_waited_for_and_counts_as_lost_if_it_stands_still(
    ended: Callable[[str], tuple[Ended, Path]],
) -> None:
    one, folder = ended("save")
    assert (one.code, steps_in(folder)) == (143, [1])
    assert "SIGTERM ends the process at once" in one.output


def one_of_two_stands_still(kind: str, event: str = "on_step_begin", is_second: bool = False, **options: Any) -> None:
    """Let the second rank stand still, and tell the first one to stop, or the other way round."""
    grace.LAST_S = 1.0
    log = Log("SIGTERM: the run stops at the end of")
    logging.getLogger("hftrain").addHandler(log)
    still = Still(event, kind, STEP, 0, log)
    policy = SavePolicy(grace_s=5.0 if kind == "sleep" else 0.6)
    trainer = make_resumable(Path("out"), save_policy=policy, max_steps=6, save_steps=2, **options)

    class Strike(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.pids = trainer.strategy.gather_object(os.getpid())
            if trainer.strategy.rank == 1:
                trainer.add_callback(still)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == STEP and trainer.strategy.rank == 1:
                os.kill(self.pids[int(is_second)], signal.SIGTERM)

    trainer.add_callback(Strike)
    trainer.train()


PAIRS: dict[str, dict[str, Any]] = {
    "sleep": {"kind": "sleep"},
    "C": {"kind": "lock_twice", "is_second": True},
    "slow": {"kind": "work", "event": "on_substep_end", "gradient_accumulation_steps": 5},
}


def test_all_ranks_end_and_name_the_one_that_has_not_come(tmp_path: Path) -> None:
    found = run_cases(one_of_two_stands_still, tmp_path, list(PAIRS.values()), timeout_s=180)
    for name, (first, second) in zip(PAIRS, found, strict=True):
        print(first.output, second.output)
        assert (first.code, second.code) == (143, 143), name
        if name == "slow":
            assert "SIGTERM stopped the training after step" in first.output
            assert "interrupts" not in first.output + second.output
            continue
        assert "rank 0: SIGTERM: the run stops at the end of train step 4" in first.output
        place = "sleep" if name == "sleep" else "lock_twice"
        if name == "sleep":  # for seconds, which it takes to ask
            assert "rank 0: Rank 1 did not come: rank 1 is in 'train step 4', at sleep (" in first.output
        assert f"rank 1: SIGTERM interrupts train step 4, at {place} (" in second.output
        assert "The last checkpoint is checkpoint-2; 1 whole steps after it are lost" in first.output


def one_of_two_is_killed(is_early: bool = False, **options: Any) -> None:
    """Let the second rank be killed while both write, before the next step or in it, and tell the first one to stop."""
    consensus._ANSWER_S = 2.0
    trainer = make_resumable(
        Path("out"), save_policy=SavePolicy(grace_s=1.0, save_async=True), max_steps=6, save_steps=2, **options
    )
    flush, has_come = files.fsync_tree, Path("has_come")

    def fsync_tree(folder: Path) -> None:
        if trainer.strategy.rank == 1:
            while not (is_early or has_come.exists()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(folder)

    class Strike(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if is_early and state.global_step == 2:
                time.sleep(2.0 if trainer.strategy.rank == 0 else FOREVER_S)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and trainer.strategy.rank == 0:
                has_come.touch()
                begun_s = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)
                with contextlib.suppress(BaseException):
                    time.sleep(FOREVER_S)
                print(f"waited {time.monotonic() - begun_s:.1f} s", flush=True)

    files.fsync_tree = fsync_tree
    trainer.add_callback(Strike)
    trainer.train()


def test_a_write_that_waits_for_a_rank_that_is_gone_gets_no_longer_grace(tmp_path: Path) -> None:
    (first, second), early = run_cases(one_of_two_is_killed, tmp_path, [{}, {"is_early": True}], timeout_s=180)
    print(first.output, second.output)
    assert second.code == -signal.SIGKILL
    assert first.code == 143
    found = re.search(r"waited (.*) s", first.output)
    assert found is not None
    assert 0.9 < float(found[1]) < 4.0
    # Here its next step fails first: it must not wait for the write as long as for a rank that is late.
    assert [each.code for each in early] == [1, -signal.SIGKILL], early[0].output
    assert "There was no word from rank 1" in early[0].output
    assert early[0].end_s < 40.0


@pytest.mark.parametrize("value", [0, -1.0, True, "30"])
def test_grace_is_a_number_above_zero_or_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"SavePolicy\(grace_s="):
        SavePolicy(grace_s=value)
