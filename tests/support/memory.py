"""What the steps of a training allocate, as torch's profiler sees it on a CPU, and what a process takes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hftrain import TrainerCallback


class StepMemory(TrainerCallback):
    """The most memory that each step takes at a time, beyond what was there before it, in bytes."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.profile.stop()
        events = [event for event in self.profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        self.peaks.append(peak)


def own_bytes() -> int:
    """Return this process's memory without that of files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """Note the most that there is while the context lasts."""

    def __enter__(self) -> Peak:
        self.is_over, self.first = threading.Event(), own_bytes()
        self.most = self.first
        self.start()
        return self

    def run(self) -> None:
        while not self.is_over.wait(0.02):
            self.most = max(self.most, own_bytes())

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.join()
