"""G1: a kill at any instant loses at most the work since the last committed checkpoint; resuming needs no hands.

Real runs of the Trainer, each saving after every step, so that nearly every instant lies within a save. A server that
has imported everything forks for each round.
"""

from __future__ import annotations

import builtins
import errno
import functools
import hashlib
import itertools
import json
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import ForkServer, kill
from support.tiny import Net, Noisy, make_rows, make_trainer, on_tensor_ranks

from hftrain import CheckpointError, SavePolicy, Trainer, TrainerCallback, set_seed
from hftrain.checkpoint import manager
from hftrain.checkpoint.manifest import verify

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

NUM_STEPS = 12
TIMES = ("runtime", "per_second")


class Diary(TrainerCallback):
    """Note where a run begins and what it commits, so that the note outlives the process."""

    def __init__(self, path: Path) -> None:
        self._notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, state: Any, what: str) -> None:
        if state.is_world_process_zero:
            os.write(self._notes, f"{what} {state.global_step}\n".encode())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(state, "began")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(state, "committed")


class HoldWrite:
    """Hold a write in the background once its files are complete, note that, and wait to be killed."""

    def __init__(self, notes: Path, *, at_step: int) -> None:
        write_manifest = manager.write_manifest

        def write(*args: Any, step: int, **options: Any) -> Any:
            if step == at_step:
                notes.write_text(threading.current_thread().name)
                time.sleep(60)
            return write_manifest(*args, step=step, **options)

        manager.write_manifest = write


def digest_of(trainer: Trainer) -> str:
    """Return what tells apart any two runs: weights, optimizer and history to the last bit."""
    history = [
        {name: value for name, value in entry.items() if not name.endswith(TIMES)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    assert trainer.optimizer is not None
    state = trainer.optimizer.state_dict()
    tensors = [*trainer.model.state_dict().values()]
    tensors += [value for entry in state["state"].values() for value in entry.values()]
    own = [value.to_local() if hasattr(value, "to_local") else value for value in tensors]
    parts = [value.numpy().tobytes() for value in own]
    parts.append(json.dumps([history, state["param_groups"]], sort_keys=True).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(
    folder: str,
    *,
    resume: bool,
    limit: int,
    steps: int = NUM_STEPS,
    save_steps: int = 1,
    arm: Any = None,
    save_async: bool = False,
    hold: int | None = None,
    mesh: bool = False,
) -> str:
    Path(folder).mkdir(exist_ok=True)
    set_seed(3)
    if hold is not None:
        HoldWrite(Path(folder) / "held", at_step=hold)
    trainer = make_trainer(
        Path(folder) / "out", Net(dropout=0.2), train_dataset=Noisy(make_rows(50)),
        callbacks=[Diary(Path(folder) / "diary"), *([Armed(arm)] if arm else [])],
        save_policy=SavePolicy(save_async=save_async), max_steps=steps, save_strategy="steps", save_steps=save_steps,
        save_total_limit=limit, logging_steps=3, strategy=on_tensor_ranks() if mesh else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return digest_of(trainer)


def places(num_ranks: int) -> list[dict[str, str]]:
    """Return the variables that a launcher sets for each rank, with a port of their own."""
    if num_ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    return [
        {**common, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)
    ]


def read_diary(folder: Path) -> list[tuple[str, int]]:
    path = folder / "diary"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def kill_in_turn(pids: list[int], choose: random.Random) -> None:
    """Kill all ranks, in an order and with pauses by chance: a launcher ends the others when one is gone."""
    for pid in choose.sample(pids, len(pids)):
        kill(pid)
        time.sleep(choose.choice((0.0, choose.uniform(0, 0.05))))


def wait_for_commit(server: ForkServer, folder: Path, *, more_than: int) -> None:
    """Wait until a run has committed a later step or has ended, or for a while."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not server.has_ended():
        if any(what == "committed" and step > more_than for what, step in read_diary(folder)):
            return
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(serve) as server:
        yield server


def check_sweep(
    server: ForkServer, tmp_path: Path, *, num_ranks: int, limit: int, num_rounds: int, mesh: bool = False
) -> None:
    choose, done, at_stake, num_finished = random.Random(num_ranks * 10 + limit), 0, 0, 0
    for folder in (tmp_path / "cold", tmp_path / "whole"):  # the first has everything to import
        first = {"folder": str(folder), "resume": False, "limit": limit, "mesh": mesh}
        server.start(envs=places(num_ranks), action="train", **first)
        started_s = time.monotonic()
        whole = server.wait()
        duration_s = time.monotonic() - started_s
        assert set(whole.statuses) == {0}, whole.output
    while done < num_rounds:
        folder, num_finished = tmp_path / f"run{num_finished}", num_finished + 1
        statuses: set[int] = set()
        while statuses != {0}:
            committed = max([step for what, step in read_diary(folder) if what == "committed"], default=0)
            options = {"folder": str(folder), "resume": committed > 0, "limit": limit, "mesh": mesh}
            running = server.start(envs=places(num_ranks), action="train", **options)
            is_killed = done < num_rounds
            if is_killed:
                if choose.random() < 0.7:  # most kills are to hit a run that has something to lose
                    wait_for_commit(server, folder, more_than=committed)
                    time.sleep(choose.uniform(0.0, 0.3 * duration_s))
                else:
                    time.sleep(choose.uniform(0.0, 0.7 * duration_s))
                kill_in_turn(running.pids, choose)
                done, at_stake = done + 1, at_stake + (committed > 0)
            ended = server.wait()
            statuses = set(ended.statuses)
            # A rank may see the other's end before its own.
            assert statuses <= {0, -signal.SIGKILL, *([1] if num_ranks > 1 else [])}, ended.output
            assert is_killed or statuses == {0}, ended.output
        assert ended.results == whole.results, "the run that was killed again and again differs"
        check_what_is_left(folder)
    assert at_stake > num_rounds // 4, "too few kills came after a commit"


def test_sigkill_while_a_save_is_written_in_the_background_costs_that_save_alone(
    server: ForkServer, tmp_path: Path
) -> None:
    options = {"action": "train", "limit": 1, "save_steps": 3, "save_async": True}
    whole = server.call(folder=str(tmp_path / "whole"), resume=False, **options)
    folder = tmp_path / "run"
    running = server.start(folder=str(folder), resume=False, hold=6, **options)
    deadline = time.monotonic() + 60
    held = folder / "held"
    while not (held.exists() and held.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    kill(running.pids[0])
    assert server.wait().statuses == [-signal.SIGKILL]
    assert held.read_text() == "hftrain-save"
    left = sorted(path.name for path in (folder / "out").iterdir())
    assert re.fullmatch(r"\.staging-[0-9a-f]{8}-checkpoint-6 checkpoint-3 journal\.jsonl", " ".join(left))
    verify(folder / "out" / "checkpoint-3")
    assert server.call(folder=str(folder), resume=True, **options) == whole
    assert {path.name for path in (folder / "out").iterdir()} == {"checkpoint-12", "journal.jsonl"}
    assert ("began", 3) in read_diary(folder)


def check_what_is_left(folder: Path) -> None:
    """No run began before what an earlier one had committed, and nothing but whole checkpoints is there."""
    reached = 0
    for what, step in read_diary(folder):
        assert what != "began" or step >= reached, read_diary(folder)
        reached = max(reached, step)
    for path in (folder / "out").iterdir():
        if path.name != "journal.jsonl":
            verify(path)


@pytest.mark.parametrize("limit", [1, 2])
def test_sigkill_of_a_saving_run_costs_no_committed_step(server: ForkServer, tmp_path: Path, limit: int) -> None:
    check_sweep(server, tmp_path, num_ranks=1, limit=limit, num_rounds=6)


@pytest.mark.distributed
def test_sigkill_of_two_saving_ranks_costs_no_committed_step(server: ForkServer, tmp_path: Path) -> None:
    check_sweep(server, tmp_path, num_ranks=2, limit=1, num_rounds=6)


@pytest.mark.guarantees
@pytest.mark.distributed
def test_sigkill_of_two_saving_tensor_ranks_costs_no_committed_step(server: ForkServer, tmp_path: Path) -> None:
    check_sweep(server, tmp_path, num_ranks=2, limit=1, num_rounds=6, mesh=True)


@pytest.mark.guarantees
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hundreds_of_sigkills_cost_no_committed_step(
    server: ForkServer, tmp_path: Path, num_ranks: int, limit: int
) -> None:
    check_sweep(server, tmp_path, num_ranks=num_ranks, limit=limit, num_rounds=60)


class Armed(TrainerCallback):
    """Call a function once the first checkpoint is committed."""

    def __init__(self, arm: Any) -> None:
        self._arm = arm

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._arm()


class Fault:
    """Let one of a save's operations fail, counted from the second save on, or it and all that follow.

    What `torch.save` writes without a file of ours it opens in C++, so there the call fails.
    """

    def __init__(self, folder: Path, *, nth: int, code: int, is_lasting: bool) -> None:
        self._folder, self._nth, self._code, self._is_lasting = str(folder), nth, code, is_lasting
        self.num_calls, self.is_armed, self.failed = 0, False, ""
        for owner, name in ((builtins, "open"), (os, "open"), (os, "mkdir"), (os, "rename"), (os, "replace"),
                            (os, "fsync"), (torch, "save")):  # fmt: skip
            setattr(owner, name, self._wrapped(name, getattr(owner, name)))

    def _wrapped(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_read = name == "open" and not (
                isinstance(args[1], str) and set(args[1]) & set("wax+") if len(args) > 1 else kwargs.get("mode")
            )
            is_here = name == "fsync" or any(self._folder in str(each) for each in args[:2])
            # No save writes to it; its own test lets it fail.
            is_here = is_here and not str(args[0]).endswith("journal.jsonl")
            if self.is_armed and is_here and not is_read:
                self.num_calls += 1
                if self.num_calls == self._nth or (self._is_lasting and self.num_calls > self._nth):
                    self.failed = self.failed or name
                    raise OSError(self._code, os.strerror(self._code))
            return function(*args, **kwargs)

        return call

    def arm(self) -> None:
        self.is_armed = True


def train_on_a_failing_disk(folder: str, **fault: Any) -> list[str]:
    """Train until a write fails, look at what is left, and go on once the disk works again."""
    disk = Fault(Path(folder) / "out", **fault)
    error = ""
    try:
        digest = train(folder, resume=False, limit=2, steps=6, save_steps=2, arm=disk.arm)
    except CheckpointError as caught:
        error = str(caught)
    disk.is_armed = False
    left = sorted(
        path for path in (Path(folder) / "out").iterdir() if path.name[0] != "." and path.name != "journal.jsonl"
    )
    assert left, "no checkpoint is left"
    for path in left:
        verify(path)
    if error:
        digest = train(folder, resume=True, limit=2, steps=6, save_steps=2)
    return [disk.failed, error, digest]


def train_with_short_files(folder: str, max_bytes: int) -> list[str]:
    """The same with a limit that the system itself sets to files: longer ones really fail while they are written."""
    error = ""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        arm = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (max_bytes, hard))
        digest = train(folder, resume=False, limit=2, steps=6, save_steps=2, arm=arm)
    except CheckpointError as caught:
        error = str(caught)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for path in (Path(folder) / "out").glob("checkpoint-*"):
        verify(path)
    if error:
        digest = train(folder, resume=True, limit=2, steps=6, save_steps=2)
    return ["write", error, digest]


def serve(action: str, **options: Any) -> Any:
    known = {"train": train, "failing disk": train_on_a_failing_disk, "short files": train_with_short_files}
    return known[action](**options)


def train_whole(server: ForkServer, folder: Path) -> str:
    return server.call(action="train", folder=str(folder), resume=False, limit=2, steps=6, save_steps=2)


def check_faults(server: ForkServer, tmp_path: Path, *, every: int, codes: list[int], lasting: list[bool]) -> int:
    num_failed, whole = 0, train_whole(server, tmp_path / "whole")
    for code, is_lasting in itertools.product(codes, lasting):
        for nth in itertools.count(1, every):
            folder = str(tmp_path / f"{code}-{is_lasting}-{nth}")
            failed, error, digest = server.call(
                action="failing disk", folder=folder, nth=nth, code=code, is_lasting=is_lasting
            )
            if not failed:
                break
            assert digest == whole, (failed, nth, error)
            assert not error or os.strerror(code) in error, error
            num_failed += 1
    return num_failed


def test_write_that_fails_leaves_earlier_checkpoints_and_an_exact_resume(server: ForkServer, tmp_path: Path) -> None:
    assert check_faults(server, tmp_path, every=9, codes=[errno.ENOSPC], lasting=[False]) >= 5


@pytest.mark.guarantees
@pytest.mark.timeout(3600)
def test_write_that_fails_anywhere_leaves_an_exact_resume(server: ForkServer, tmp_path: Path) -> None:
    codes = [errno.ENOSPC, errno.EIO, errno.EROFS]
    assert check_faults(server, tmp_path, every=1, codes=codes, lasting=[False, True]) >= 100


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.guarantees)])
def test_file_that_cannot_get_long_enough_leaves_an_exact_resume(
    server: ForkServer, tmp_path: Path, every: int
) -> None:
    whole = train_whole(server, tmp_path / "whole")
    sizes = {path.stat().st_size for path in (tmp_path / "whole/out/checkpoint-4").iterdir()}
    for max_bytes in sorted(size - 1 for size in sizes)[::every]:
        folder = str(tmp_path / str(max_bytes))
        _, error, digest = server.call(action="short files", folder=folder, max_bytes=max_bytes)
        assert "Cannot write " in error
        assert digest == whole, error
