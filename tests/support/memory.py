"""What the steps of a training allocate, as torch's profiler sees it on a CPU."""

from __future__ import annotations

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
