"""Memory used by the constructor and each stage: the documented `skip_memory_metrics=False` report."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.core.extras import require

_SAMPLE_INTERVAL_S = 0.005


@dataclass(eq=False)
class MemoryMeter:
    """Measure how a section of code changes one counter of bytes.

    Args:
        read_peak: Returns the peak since `reset_peak`; None if the counter keeps no peak, so that `look` samples it.
        reset_peak: Resets the peak, also for other readers of it.
    """

    read: Callable[[], int]
    read_peak: Callable[[], int] | None = None
    reset_peak: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin a section."""
        if self.reset_peak is not None:
            self.reset_peak()
        self._use_at_start = self._peak = self.read()

    def look(self) -> None:
        """Record the current use."""
        self._peak = max(self._peak, self.read())

    def deltas(self) -> dict[str, int]:
        """Return the bytes gained and the bytes freed after the peak; their sum is what the section needed."""
        end = self.read()
        peak = self._peak if self.read_peak is None else self.read_peak()
        return {"alloc_delta": end - self._use_at_start, "peaked_delta": max(0, peak - end)}


class MemoryTracker:
    """Measure the outermost running stage; nested stages count towards it.

    Only the first process measures. The peak of the process's memory (RSS) is sampled by a thread and may be missed.
    That of a CUDA device, or of another device whose torch module records a peak, is exact. Both are those of this
    process and its device.

    Source: the documented memory report, `<stage>_mem_<cpu|gpu>_<alloc|peaked>_delta`, in bytes.
    """

    def __init__(self, *, is_on: bool, is_main: bool, device_type: str) -> None:
        if is_on:
            require("psutil", feature="skip_memory_metrics=False")
        self._meters = _meters(device_type) if is_on and is_main else {}
        self._stage: str | None = None
        self._init_report: dict[str, int] = {}
        # Set only while a stage runs: neither can be pickled with a Trainer.
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, stage: str | None = None) -> None:
        """Begin ``"init"``, ``"train"``, ``"eval"`` or ``"test"``, unless a stage runs already; resets the peaks."""
        if stage is None or not self._meters or self._stage is not None:
            return
        self._stage = stage
        gc.collect()
        for meter in self._meters.values():
            meter.start()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(self._stop,), name="hftrain-memory", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        """End the stage and return its report, with that of the constructor if it was not returned yet."""
        if self._stage is None or self._thread is None or self._stop is None:
            return {}
        self._stop.set()
        self._thread.join()
        gc.collect()
        report = {
            f"{self._stage}_mem_{segment}_{name}": value
            for segment, meter in self._meters.items()
            for name, value in meter.deltas().items()
        }
        if self._stage == "init":
            self._init_report = report
        else:
            report, self._init_report = {**self._init_report, **report}, {}
        self._stage = self._thread = self._stop = None
        return report

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """Add the report of a stage that is still running; like `start` without a stage, for copied code."""
        if metrics is not None:
            metrics.update(self.stop())

    def _sample(self, stop: threading.Event) -> None:
        meters = [meter for meter in self._meters.values() if meter.read_peak is None]
        while not stop.wait(_SAMPLE_INTERVAL_S):
            for meter in meters:
                meter.look()


def _meters(device_type: str) -> dict[str, MemoryMeter]:
    import psutil

    process = psutil.Process()
    meters = {"cpu": MemoryMeter(lambda: int(process.memory_info().rss))}
    if device_type == "mps":
        # MPS records no peak.
        meters["gpu"] = MemoryMeter(torch.mps.current_allocated_memory)
    elif (meter := device_meter(device_type)) is not None:
        meters["gpu"] = meter
    return meters


def device_meter(device_type: str) -> MemoryMeter | None:
    """Return the meter of devices whose torch module records a peak, else None; it initialises no unused device."""
    module: Any = getattr(torch, device_type, None)
    if not hasattr(module, "max_memory_allocated"):
        return None

    def when_awake(function: Callable[[], Any]) -> Callable[[], Any]:
        is_awake = getattr(module, "is_initialized", lambda: True)
        return lambda: function() if is_awake() else 0

    return MemoryMeter(
        when_awake(module.memory_allocated),
        read_peak=when_awake(module.max_memory_allocated),
        reset_peak=when_awake(module.reset_peak_memory_stats),
    )
