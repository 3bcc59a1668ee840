"""Scripts in processes of their own that begin in milliseconds: forked from one that has imported everything."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.forking import ForkServer

from hftrain.core import launcher
from hftrain.extras.flight import ledger


def be_python(words: list[str], folder: str, variables: dict[str, str]) -> None:
    """Do in this process what ``python WORDS`` does: `-c` with code, or a script, and their arguments."""
    os.chdir(folder)
    os.environ.update(variables)
    for module in (launcher, ledger):  # as a process that begins here would note
        vars(module).update(STARTED_IN=folder)
    sys.orig_argv, sys.argv = [sys.executable, *words], words
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


class ForkedPython(ForkServer):
    """Run scripts one at a time; in a `with` statement, or in `replaying`."""

    def __init__(self) -> None:
        super().__init__(be_python)

    def run(self, words: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS`` in a folder, with more environment variables."""
        self.start(words=[*words], folder=str(folder), variables=variables)
        ended = self.wait()
        return subprocess.CompletedProcess([*words], ended.statuses[0], ended.output)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let `hftrain replay` use these processes; `test_blame.py` sees those that it starts itself."""

        def run_apart(code: str, told: str, processes: int) -> subprocess.CompletedProcess[str]:
            assert processes == 1
            return self.run(["-c", code, told], Path.cwd())

        with self, pytest.MonkeyPatch.context() as patch:
            patch.setattr("hftrain.cli.replay.run_apart", run_apart)
            yield
