"""Models of transformers, which save themselves, written in the background while they train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_trainer
from support.writes import At, Gate, same_files

from hftrain import SavePolicy, Trainer, set_seed

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

TOKENS = [{"input_ids": torch.arange(6) + start, "labels": torch.arange(6) + start} for start in range(16)]


def train(folder: Path, steps: At, *, save_async: bool) -> Trainer:
    import transformers

    set_seed(1)
    # Two names for one weight, and settings that training changes and a checkpoint must not show.
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100, "gradient_checkpointing": True}
    trainer = make_trainer(
        folder, model, train_dataset=TOKENS, callbacks=[steps], save_policy=SavePolicy(save_async=save_async),
        max_steps=6, **arguments,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_model_that_saves_itself_is_saved_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    train(tmp_path / "now", At(2), save_async=False)
    gate = Gate(monkeypatch)
    steps = At(2, do={5: gate.opened.set})
    train(tmp_path / "later", steps, save_async=True)
    same_files(tmp_path / "later", tmp_path / "now")
    assert (tmp_path / "later" / "checkpoint-2" / "config.json").is_file()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "later" / "checkpoint-2")
    assert loaded.config.use_cache
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, steps.weights[2][name]), name
