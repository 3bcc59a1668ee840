"""Azure ML, with a stand-in: its package asks for the service as soon as a run is opened."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.tiny import make_rows, train


class Run:
    """What of an Azure ML run is used."""

    id = "run-1"
    current: Run

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.rows: list[tuple[str, float, int]] = []

    @classmethod
    def get_context(cls) -> Run:
        return cls.current

    def tag(self, name: str, value: str) -> None:
        self.tags[name] = value

    def log(self, name: str, value: float, description: str = "", step: int | None = None) -> None:
        assert step is not None
        self.rows.append((name, value, step))


def test_run_hears_metrics_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("azureml", "azureml.core", "azureml.core.run"):
        module: Any = ModuleType(name)
        module.__path__ = []
        module.__spec__ = object()
        module.Run = Run
        monkeypatch.setitem(sys.modules, name, module)
    Run.current = Run()
    trainer = train(tmp_path, train_dataset=make_rows(8), report_to="azure_ml")
    losses = [(step, value) for name, value, step in Run.current.rows if name == "train/loss"]
    assert losses == [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert Run.current.tags["learning_rate"] == "0.01"
