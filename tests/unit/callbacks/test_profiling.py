"""`Trainer(profiler=)`: where the time goes, without another result."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_rows, make_trainer

from hftrain import ConfigError, SimpleProfiler, TaskModule, TorchProfiler, set_seed


def run(folder: Path, profiler: Any = None, model: Any = None, **options: Any) -> Any:
    set_seed(0)
    settings: Any = {"max_steps": 4, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"eval_dataset": make_rows(8), "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(folder, model or Net(0.1), profiler=profiler, **settings | options)
    trainer.train()
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    return [p.detach() for p in trainer.model.parameters()]


class Slow(TaskModule):
    """Computes for 20 ms."""

    def training_step(self, batch: Any) -> torch.Tensor:
        time.sleep(0.02)
        return self.model(**batch)[0]


def test_table_says_how_often_and_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = SimpleProfiler()
    start_s = time.perf_counter()
    trainer = run(tmp_path, profiler, Slow(Net(0.1)))
    took_s = time.perf_counter() - start_s
    counts = {"forward": 8, "backward": 8, "clip": 4, "step": 4, "log": 4, "evaluate": 2, "save": 2, "transfer": 16}
    assert {name: profiler.counts[name] for name in counts if name != "transfer"} == {
        name: number for name, number in counts.items() if name != "transfer"
    }
    assert profiler.counts["data"] >= 4
    assert profiler.counts["transfer"] >= 8
    assert 8 * 0.02 <= profiler.seconds["forward"] < sum(profiler.seconds.values()) <= took_s
    shown = capsys.readouterr().out
    assert "forward" in shown.splitlines()[-11 + 2 :][0] or "forward" in shown
    assert "total" in shown
    assert "to_device" not in vars(trainer.strategy)


@pytest.mark.parametrize("profiler", ["simple", "torch"])
def test_a_profile_changes_no_result(tmp_path: Path, profiler: str) -> None:
    plain, profiled = run(tmp_path / "plain"), run(tmp_path / "profiled", profiler)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(profiled), strict=True))


def test_trace_has_the_parts_of_a_step(tmp_path: Path) -> None:
    profiler = TorchProfiler(wait=1, warmup=1, active=2)
    run(tmp_path, profiler)
    assert profiler.path == tmp_path / "profile" / "rank0.json.gz"
    with gzip.open(profiler.path, "rt", encoding="utf-8") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"data", "forward", "backward", "clip", "step"} <= names


def test_unknown_profilers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profiler='advanced'"):
        run(tmp_path, "advanced")
    with pytest.raises(ConfigError, match="active=0"):
        TorchProfiler(active=0)
