"""The memory report: its keys, what belongs to which stage, and that no thread outlives it."""

from __future__ import annotations

import re
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.tiny import Net, Task, make_arguments, make_rows

from hftrain import MissingDependencyError, TaskError, Trainer
from hftrain.extras import memory
from hftrain.extras.memory import MemoryMeter, MemoryTracker


def keys(*stages: str, segments: tuple[str, ...] = ("cpu",)) -> set[str]:
    return {
        f"{stage}_mem_{segment}_{kind}_delta"
        for stage in stages
        for segment in segments
        for kind in ("alloc", "peaked")
    }


def found(metrics: Any) -> set[str]:
    return {name for name in metrics if "_mem_" in name}


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hftrain-memory"]


make_trainer = partial(
    tiny.make_trainer,
    skip_memory_metrics=False,
    num_train_epochs=1,
    train_dataset=make_rows(8),
    eval_dataset=make_rows(4),
)


def test_report_is_off_by_default(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows(8), eval_dataset=make_rows(4))
    assert not found(trainer.train().metrics)
    assert not found(trainer.evaluate())


def test_init_is_reported_with_the_first_stage(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert found(trainer.train().metrics) == keys("init", "train")
    assert found(trainer.state.log_history[-1]) == keys("init", "train")
    assert found(trainer.evaluate()) == keys("eval")
    assert found(trainer.predict(make_rows(4)).metrics) == keys("test")


def test_init_is_reported_with_an_evaluation_that_comes_first(tmp_path: Path) -> None:
    assert found(make_trainer(tmp_path).evaluate()) == keys("init", "eval")
    assert found(make_trainer(tmp_path).predict(make_rows(4)).metrics) == keys("init", "test")


def test_evaluation_within_training_counts_as_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="epoch")
    seen = []

    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: seen.append(evaluate(*args, **kwargs)) or seen[-1]  # type: ignore
    assert found(trainer.train().metrics) == keys("init", "train")
    assert len(seen) == 1
    assert not found(seen[0])


def test_deltas_are_those_of_the_process(tmp_path: Path) -> None:
    size = 64 << 20

    class Hungry(Task):
        def training_step(self, batch: Any) -> Any:
            if not hasattr(self, "kept"):
                self.kept = torch.ones(size // 4)
                freed = torch.ones(size)
                threading.Event().wait(0.1)
                del freed
            return super().training_step(batch)

    arguments = make_arguments(tmp_path, skip_memory_metrics=False, max_steps=2)
    metrics = Trainer(Hungry(), arguments, train_dataset=make_rows(8)).train().metrics
    assert metrics["train_mem_cpu_alloc_delta"] == pytest.approx(size, rel=0.5)
    assert metrics["train_mem_cpu_peaked_delta"] == pytest.approx(4 * size, rel=0.5)


def test_no_thread_is_left_where_a_stage_fails(tmp_path: Path) -> None:
    with pytest.raises(TaskError):
        Trainer(Net(), make_arguments(tmp_path, skip_memory_metrics=False), callbacks=[object()])
    assert not samplers()
    trainer = make_trainer(tmp_path)
    assert not samplers()
    trainer.data_collator = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        trainer.train()
    assert not samplers()


def test_missing_psutil_is_said_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require(requirement: str, *, feature: str) -> None:
        raise MissingDependencyError(f"{feature} needs {requirement}")

    monkeypatch.setattr(memory, "require", require)
    with pytest.raises(MissingDependencyError, match="skip_memory_metrics=False needs psutil"):
        make_trainer(tmp_path)


def test_memory_given_back_is_a_negative_delta_and_a_peak_never_is() -> None:
    used = [100]
    meter = MemoryMeter(lambda: used[0])
    meter.start()
    used[0] = 150
    meter.look()
    used[0] = 40
    assert meter.deltas() == {"alloc_delta": -60, "peaked_delta": 110}
    used[0] = 500
    assert meter.deltas() == {"alloc_delta": 400, "peaked_delta": 0}


def test_device_that_keeps_its_peak_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for `torch.cuda` and its like: no such device is here."""
    device = types.SimpleNamespace(used=10, peak=70, is_awake=False)
    device.is_initialized = lambda: device.is_awake
    device.memory_allocated = lambda: device.used
    device.max_memory_allocated = lambda: device.peak
    device.reset_peak_memory_stats = lambda: setattr(device, "peak", device.used)
    monkeypatch.setattr(torch, "hpu", device, raising=False)
    tracker = MemoryTracker(is_on=True, is_main=True, device_type="hpu")
    tracker.start("init")
    assert tracker.stop()["init_mem_gpu_alloc_delta"] == 0
    assert device.peak == 70, "a device that nobody uses is left asleep"
    device.is_awake = True
    tracker.start("train")
    device.peak, device.used = 50, 30
    report = tracker.stop()
    assert report.keys() == keys("init", "train", segments=("cpu", "gpu"))
    assert (report["train_mem_gpu_alloc_delta"], report["train_mem_gpu_peaked_delta"]) == (20, 20)


@pytest.mark.cuda
def test_cuda_is_measured_exactly(tmp_path: Path) -> None:
    size = 1 << 20

    class Hungry(Task):
        def training_step(self, batch: Any) -> Any:
            if not hasattr(self, "kept"):
                self.kept = torch.ones(size, device="cuda")
                torch.ones(4 * size, device="cuda")
            return super().training_step(batch)

    arguments = make_arguments(tmp_path, skip_memory_metrics=False, max_steps=2, use_cpu=False)
    metrics = Trainer(Hungry(), arguments, train_dataset=make_rows(8)).train().metrics
    assert found(metrics) == keys("init", "train", segments=("cpu", "gpu"))
    assert metrics["train_mem_gpu_alloc_delta"] >= 4 * size
    assert metrics["train_mem_gpu_peaked_delta"] >= 12 * size


def test_report_is_printed_as_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path)
    metrics = {name: value << 20 for value, name in enumerate(sorted(keys("init", "train", segments=("cpu", "gpu"))))}
    trainer.log_metrics("train", metrics)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [re.sub(r" +", " ", line.strip()) for line in lines] == [
        "init_mem_cpu_alloc_delta = 0MB",
        "init_mem_cpu_peaked_delta = 1MB",
        "init_mem_gpu_alloc_delta = 2MB",
        "init_mem_gpu_peaked_delta = 3MB",
        "train_mem_cpu_alloc_delta = 4MB",
        "train_mem_cpu_peaked_delta = 5MB",
        "train_mem_gpu_alloc_delta = 6MB",
        "train_mem_gpu_peaked_delta = 7MB",
    ]
    assert len({line.index("=") for line in lines}) == len({len(line) for line in lines}) == 1
