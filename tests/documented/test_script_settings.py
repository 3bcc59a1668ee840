"""Settings that only scripts read: the Trainer accepts them and acts on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import train


def losses(folder: Path, **options: Any) -> list[float]:
    trainer = train(folder, max_steps=3, **options)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def plain(tmp_path: Path) -> list[float]:
    torch.manual_seed(5)
    return losses(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"do_train": False, "do_eval": False, "do_predict": False},
        {"do_train": True, "do_eval": True, "do_predict": True},
        {"resume_from_checkpoint": "nowhere"},
        {"run_name": "other"},
    ],
)
def test_settings_for_scripts_change_nothing(tmp_path: Path, plain: list[float], options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    assert losses(tmp_path, **options) == plain
