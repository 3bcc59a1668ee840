"""Two processes push as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import running_hub
from support.tiny import make_rows, make_trainer

pytestmark = pytest.mark.distributed


def train(folder: str) -> list[Any]:
    """Train and push by hand; return what this process knows of the Hub."""
    options = {"hub_strategy": "all_checkpoints", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = make_trainer(Path(folder), train_dataset=make_rows(24), push_to_hub=True, **options)
    trainer.train()
    trainer.save_model()
    pushed = trainer.push_to_hub("by hand")
    return [trainer.hub_model_id, trainer.push_in_progress is None, pushed is None]


def test_main_process_alone_pushes(tmp_path: Path, run_distributed: Callable[..., list[Any]]) -> None:
    with running_hub() as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_alice"}
        env |= {"HF_HOME": str(tmp_path / "home")}
        assert run_distributed(train, folder=str(tmp_path / "mine"), env=env) == [
            ["alice/mine", False, False],
            [None, True, True],
        ]
        assert sum(request.endswith("/api/repos/create") for request in hub.requests) == 1
        assert hub.messages == [
            "Training in progress, step 2",
            "Training in progress, step 4",
            "End of training",
            "Model save",
            "by hand",
        ]
        assert {"checkpoint-4/rng_state_0.pth", "checkpoint-4/rng_state_1.pth"} <= hub.repo.files.keys()
