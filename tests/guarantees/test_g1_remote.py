"""G1 on a remote store: a kill at any instant costs no committed checkpoint, on a real S3 server that also fails.

Every round begins with an empty mirror, as on another machine.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.s3_server import BUCKET, KINDS, S3Server

from hftrain import ConfigError
from hftrain.checkpoint.manifest import MANIFEST, checkpoint_step, verify
from hftrain.checkpoint.rotation import UnreachableError
from hftrain.extras.remote.checkpoints import RemoteCheckpoints
from hftrain.extras.remote.folders import RemoteFolder
from hftrain.storage.files import CACHE_VARIABLE

pytestmark = pytest.mark.remote

_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A real S3 server on the loopback."""
    with S3Server() as started:
        yield started


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of an empty remote folder."""
    for name, value in {**server.env, CACHE_VARIABLE: str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    server.fail(0.0)
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


class Loop:
    """Rounds of training, each in a process of its own."""

    def __init__(self, folder: str, tmp_path: Path, *, max_steps: int) -> None:
        self.folder, self.tmp_path, self.max_steps = folder, tmp_path, max_steps
        self.committed, self._rounds, self._lines, self._is_dead = 0, 0, "", True

    @contextmanager
    def running(self) -> Iterator[Loop]:
        """Have the process that forks."""
        command = [sys.executable, str(Path(__file__).with_name("remote_loop.py"))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as self._process:
            try:
                yield self
            finally:
                self._process.stdin.close()

    def start(self, **options: Any) -> int:
        """Begin a round with an empty mirror; returns the process's number."""
        self._rounds += 1
        defaults = {"folder": self.folder, "max_steps": self.max_steps, "save_steps": 1, "limit": 2, "outcome": None}
        wishes = {**defaults, "cache": str(self.tmp_path / f"mirror-{self._rounds}"), **options}
        self._process.stdin.write(f"{json.dumps(wishes)}\n".encode())
        self._process.stdin.flush()
        self._is_dead = False
        return int(self.next_line().removeprefix("pid "))

    def next_line(self) -> str:
        """Wait for the next line, and note what it says: a step that is committed, or the end of the process."""
        while "\n" not in self._lines:
            ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT_S)
            chunk = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            assert chunk, "the training process is gone, or silent"
            self._lines += chunk.decode()
        line, _, self._lines = self._lines.partition("\n")
        if line.startswith("step "):
            self.committed = int(line.removeprefix("step "))
        self._is_dead = line == "dead"
        assert not line.startswith("error"), line
        return line

    def finish(self) -> None:
        """Read on until the round's process is dead."""
        while not self._is_dead:
            self.next_line()


def sweep(server: S3Server, url: str, tmp_path: Path, *, num_rounds: int, share: float) -> None:
    """Kill `num_rounds` runs at random instants, look each time for what was committed, and compare the end."""
    choose = random.Random(num_rounds)
    reference, ending = tmp_path / "reference.pt", tmp_path / "ending.pt"
    lost = []
    with Loop(url, tmp_path, max_steps=20 * num_rounds).running() as loop:
        loop.start(folder=str(tmp_path / "whole"), outcome=str(reference), save_steps=10**6)
        loop.finish()
        loop.committed = 0
        server.fail(share, seed=num_rounds)
        for number in range(num_rounds):
            pid = loop.start(limit=1 + number % 2)
            if number % 3:  # else anywhere, in finding and fetching too
                while not loop.next_line().startswith(("step", "dead")):
                    pass
            time.sleep(choose.uniform(0, 0.8 if number % 3 else 2.0))
            os.kill(pid, signal.SIGKILL)  # also if the run has ended, see remote_loop.py
            loop.finish()
            found = RemoteCheckpoints(url, mirror=tmp_path / f"look-{number}").latest()
            step = 0 if found is None else verify(found).step
            if step < loop.committed:
                lost.append((number, step, loop.committed))
            loop.committed = step
        assert lost == []
        assert loop.committed > num_rounds // 4  # else nothing was ever at stake
        server.fail(0.0)
        loop.start(outcome=str(ending), save_steps=10**6)
        loop.finish()
    ours, whole = (torch.load(path, weights_only=True) for path in (ending, reference))
    assert ours["history"] == whole["history"]
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ours[part], whole[part], rtol=0, atol=0)
    left = {name.partition("/")[0] for name in RemoteFolder(url).names()} - {"journal.jsonl"}
    assert all(checkpoint_step(name) is not None for name in left)
    assert all(MANIFEST in RemoteFolder(url).sizes(name) for name in left), "leftovers were not swept"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_sigkill_costs_no_committed_checkpoint(server: S3Server, s3: str, tmp_path: Path) -> None:
    sweep(server, s3, tmp_path, num_rounds=6, share=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_there_and_back_through_every_kind_of_failure(
    server: S3Server, s3: str, tmp_path: Path, kind: str
) -> None:
    folder, content = RemoteFolder(s3), os.urandom(300_000)
    folder.names()  # the session begins undisturbed
    before, state = server.num_failed()[kind], random.getstate()
    server.fail(0.3, kinds=(kind,), seed=1)
    (tmp_path / "whole").write_bytes(content)
    for number in range(4):
        folder.upload(tmp_path / "whole", f"a/{number}")
        folder.download(f"a/{number}", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content
    assert folder.sizes("a") == {str(number): len(content) for number in range(4)}
    folder.delete_folder("a")
    assert folder.names() == []
    assert server.num_failed()[kind] > before
    # botocore draws the waits between its attempts from Python's own generator.
    assert random.getstate() == state


def test_a_store_that_never_answers_well_is_given_up(
    server: S3Server, s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hftrain.extras.remote.folders._WAITS_S", (0.1,))
    folder = RemoteFolder(s3)
    folder.names()
    server.fail(1.0, kinds=("error",))
    with pytest.raises(OSError, match="put_file a"):
        folder.write("a", "text")
    with pytest.raises(UnreachableError, match="Check the network"):
        RemoteCheckpoints(s3, mirror=tmp_path).latest()


def test_a_bucket_that_is_absent_is_found_before_training(s3: str) -> None:
    with pytest.raises(ConfigError, match="Check that the bucket or folder exists"):
        RemoteFolder("s3://no-such-bucket/run").check_writable()


@pytest.mark.guarantees
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_sigkill_costs_no_committed_checkpoint_in_many_rounds(
    server: S3Server, s3: str, tmp_path: Path, share: float
) -> None:
    sweep(server, s3, tmp_path, num_rounds=50, share=share)
