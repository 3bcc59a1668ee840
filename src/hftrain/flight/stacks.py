"""Write down where a process stands when it is asked to, or when a step takes too long."""

from __future__ import annotations

import faulthandler
import re
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = re.compile(r"stacks-rank(\d+)\.txt")
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')


class StackDumps:
    """Append the Python stacks of all threads to ``stacks-rank0.txt`` on SIGQUIT, and if no step ends for a while.

    Works in a process whose main thread hangs in a collective or in C code: no Python code runs.

    Args:
        timeout_s: Seconds within which a step must end; None for no limit.
    """

    def __init__(self, path: Path, *, timeout_s: float | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: Any = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._timeout_s = timeout_s
        if hasattr(signal, "SIGQUIT"):
            faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)
        self.rearm()

    def rearm(self) -> None:
        """Begin to wait again: a step has ended."""
        if self._timeout_s is not None:
            faulthandler.dump_traceback_later(self._timeout_s, file=self._file)

    def close(self) -> None:
        """Stop waiting, and let SIGQUIT act as ever."""
        if self._timeout_s is not None:
            faulthandler.cancel_dump_traceback_later()
        if hasattr(signal, "SIGQUIT"):
            faulthandler.unregister(signal.SIGQUIT)
        self._file.close()


@dataclass(frozen=True)
class Stack:
    """Where the main thread of some ranks stands.

    Args:
        ranks: Those with the same stack.
        frames: (file, line, function), the innermost first.
    """

    ranks: list[int]
    frames: tuple[tuple[str, int, str], ...]


def read_stacks(folder: Path) -> list[Stack]:
    """Return the last stacks of the main threads that processes wrote, equal ones together, the most frequent first."""
    found: dict[tuple[tuple[str, int, str], ...], list[int]] = defaultdict(list)
    for path in folder.glob("stacks-rank*.txt"):
        name, text = _FILE.fullmatch(path.name), path.read_text(encoding="utf-8", errors="replace")
        if name and (frames := _main_thread(text)):
            found[frames].append(int(name[1]))
    stacks = [Stack(sorted(ranks), frames) for frames, ranks in found.items()]
    return sorted(stacks, key=lambda each: (-len(each.ranks), each.ranks))


def _main_thread(text: str) -> tuple[tuple[str, int, str], ...]:
    """Return the frames of the thread written last: the main thread is the oldest, and the last of each dump."""
    frames: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif match := _FRAME.match(line):
            frames.append((match[1], int(match[2]), match[3]))
    return tuple(frames)
