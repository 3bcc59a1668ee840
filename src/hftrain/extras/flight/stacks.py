"""Write down where a process stands when it is asked to, or when a step takes too long."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

_PHASE_BYTES = 64
_c10d: Any = _distributed_c10d  # its types lack the recorder
_POLL_S = 0.5
_FILE = re.compile(r"stacks-rank(\d+)\.txt")
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')


class Phase:
    """What a process does, in a file that outlives it. A change takes less than a microsecond, and no system call.

    Attributes:
        step: The step whose data was read last.
        text: Such as ``"step 12, backward"``.
    """

    def __init__(self) -> None:
        self.step, self.text, self._name = 0, "step 0", ""
        self._memory: Any = bytearray(_PHASE_BYTES)

    def open(self, path: Path) -> None:
        """Keep it in a file from now on."""
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.write(self.text.encode().ljust(_PHASE_BYTES))
            file.flush()  # allocated before it is mapped: a full disk raises here
            self._memory = mmap.mmap(file.fileno(), _PHASE_BYTES)

    def begin(self, name: str) -> str:
        """Note that a phase begins, an empty name for none; return the name of the one before."""
        before, self._name = self._name, name
        self.text = f"step {self.step}, {name}" if name else f"step {self.step}"
        self._memory[:] = self.text.encode().ljust(_PHASE_BYTES)
        return before


class StackDumps:
    """Append the Python stacks of all threads to ``stacks-rank0.txt`` on SIGQUIT, and if no step ends for a while.

    Works in a process whose main thread hangs in a collective or in C code: no Python code runs. Then a thread adds
    ``place-rank0.json``: the phase, and the collectives that wait. It cannot while the main thread holds the GIL.
    Before the heartbeat ends a process because another one failed, both are written, too.

    Args:
        timeout_s: Seconds within which a step must end; None for no limit.
    """

    def __init__(self, folder: Path, strategy: Any, phase: Phase, *, timeout_s: float | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{strategy.rank}"
        self._note_path, self._phase, self._watch = folder / f"place-{name}.json", phase, strategy.watch
        phase.open(folder / f"phase-{name}.txt")
        self._file: Any = open(folder / f"stacks-{name}.txt", "a", encoding="utf-8")  # noqa: SIM115
        self._timeout_s = timeout_s
        if hasattr(signal, "SIGQUIT"):
            faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)
        self.rearm()
        if self._watch is not None:
            self._watch.before_end = self.write
        self._is_over, self._last_size = threading.Event(), self._size()
        self._thread = threading.Thread(target=self._watch_file, name="hftrain-flight", daemon=True)
        self._thread.start()

    def rearm(self) -> None:
        """Begin to wait again: a step has ended."""
        if self._timeout_s is not None:
            faulthandler.dump_traceback_later(self._timeout_s, file=self._file)

    def write(self) -> None:
        """Write where the process stands, and wait a little for it: a disk that does not answer blocks nothing."""
        faulthandler.dump_traceback_later(_POLL_S / 10, file=self._file)
        time.sleep(3 * _POLL_S)

    def close(self) -> None:
        """Stop waiting, and let SIGQUIT act as ever."""
        if self._timeout_s is not None:
            faulthandler.cancel_dump_traceback_later()
        if hasattr(signal, "SIGQUIT"):
            faulthandler.unregister(signal.SIGQUIT)
        if self._watch is not None:
            self._watch.before_end = None
        self._is_over.set()
        self._thread.join()
        self._file.close()
        self._phase.begin("ended")

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _watch_file(self) -> None:
        while not self._is_over.wait(_POLL_S):
            if (size := self._size()) != self._last_size:
                self._last_size = size
                note = {"size": size, "phase": self._phase.text, "collectives": pending_collectives()}
                with suppress(OSError):
                    self._note_path.write_text(json.dumps(note), encoding="utf-8")


def pending_collectives() -> list[str] | None:
    """Return which collectives have not ended, in order; None if torch's flight recorder has none at all."""
    if not dist.is_initialized():
        return []
    try:
        texts = [_c10d._dump_fr_trace_json()]
        texts += [_c10d._dump_nccl_trace_json()] if hasattr(_c10d, "ProcessGroupNCCL") else []
        entries = [entry for text in texts for entry in json.loads(text).get("entries", [])]
        return [_collective(entry) for entry in entries if not entry["retired"]] if entries else None
    except (AttributeError, KeyError, ValueError):
        return None


def _collective(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    tensors = ", ".join(map("{}{}".format, entry["input_dtypes"], entry["input_sizes"]))
    return f"{entry['profiling_name']} {number} of group {entry['process_group'][0]}{tensors and ': '}{tensors}"


@dataclass(frozen=True)
class Stack:
    """Where the main thread of some ranks stands.

    Args:
        ranks: Those that are at the same place.
        frames: (file, line, function), the innermost first.
        phase: The step and its phase, such as ``"step 12, backward"``.
        collective: The first one that has not ended; empty for none, None if that is not known.
    """

    ranks: list[int]
    frames: tuple[tuple[str, int, str], ...]
    phase: str
    collective: str | None


def read_stacks(folder: Path, *, since: float = 0.0) -> list[Stack]:
    """Return where processes stood when they wrote last, those at the same place together, the most frequent first.

    Of equally frequent places, one that waits in a collective comes first. `since` is a time, in seconds since 1970.
    """
    ranks_by_place: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    phases = read_phases(folder)
    for path in folder.glob("stacks-rank*.txt"):
        match, dump = _FILE.fullmatch(path.name), path.read_bytes()
        frames = _main_thread(dump.decode("utf-8", errors="replace"))
        if match is None or path.stat().st_mtime < since or not frames:
            continue
        rank = int(match[1])
        phase, collective = phases.get(rank, ""), None
        # The note next to a dump may be of an earlier one, half written or missing: the process may have been killed.
        with suppress(OSError, ValueError, LookupError, TypeError):
            note = json.loads((folder / f"place-rank{rank}.json").read_bytes())
            if note["size"] == len(dump):
                phase, pending = note["phase"], note["collectives"]
                collective = None if pending is None else "".join(pending[:1])
        ranks_by_place[frames, phase, collective].append(rank)
    stacks = [Stack(sorted(ranks), *place) for place, ranks in ranks_by_place.items()]
    return sorted(stacks, key=lambda stack: (-len(stack.ranks), not stack.collective, stack.ranks))


def read_phases(folder: Path) -> dict[int, str]:
    """Return the last phase of each rank."""
    return {
        int(path.stem[10:]): path.read_bytes().decode("utf-8", errors="replace").strip(" \0")
        for path in folder.glob("phase-rank*.txt")
    }


def _main_thread(text: str) -> tuple[tuple[str, int, str], ...]:
    """Return the frames of the thread written last: the main thread is the oldest, and the last of each dump."""
    frames: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif match := _FRAME.match(line):
            frames.append((match[1], int(match[2]), match[3]))
    return tuple(frames)
