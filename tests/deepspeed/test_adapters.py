"""Layers that train next to adapters under DeepSpeed: their files do not hold them, and a resume does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_trainer

from hftrain import ConfigError, set_seed

pytestmark = pytest.mark.deepspeed


def train(folder: str, stage: int, resume: int | None = None, **options: Any) -> list[list[float]]:
    peft = pytest.importorskip("peft")
    set_seed(0)
    model = peft.PeftModel(Net(), peft.LoraConfig(target_modules=["layers.0"], r=2))
    model.base_model.model.layers[4].requires_grad_(True)
    settings: Any = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    settings["deepspeed"] = {"zero_optimization": {"stage": stage, **options}}
    trainer = make_trainer(Path(folder), model, **settings)
    trainer.train(resume_from_checkpoint=resume and f"{folder}/checkpoint-{resume}")
    found = [value.flatten().tolist() for _, value in trainer.strategy.full_tensors(trainer.model_wrapped)]
    trainer.strategy.close()
    return found


def train_each(folder: str) -> list[bool]:
    warnings.simplefilter("ignore")
    found = []
    for stage in (0, 1, 2, 3):
        whole = train(f"{folder}/{stage}", stage)
        found.append(train(f"{folder}/{stage}", stage, 2) == whole)
    with pytest.raises(ConfigError, match="which train next to adapters"):
        train(folder, 3, stage3_gather_16bit_weights_on_model_save=True)
    return found


def test_layers_next_to_adapters_are_resumed(tmp_path: Path, run_distributed: Any) -> None:
    pytest.importorskip("peft")
    assert run_distributed(train_each, folder=str(tmp_path)) == [[True] * 4] * 2
