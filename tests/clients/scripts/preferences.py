"""TRL's trainers on pairs of answers: DPO, KTO, ORPO and rewards."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from scripts.parts import ARGUMENTS, llama, llama_config, sentences, tokenizer

SETTINGS = {**ARGUMENTS, "bf16": False, "eval_strategy": "steps", "eval_steps": 3, "max_length": 24}


def pairs(count: int, *, seed: int) -> Dataset:
    """Return prompts with a better and a worse answer."""
    return Dataset.from_dict(
        {
            "prompt": [text + " " for text in sentences(count, seed=seed)],
            "chosen": sentences(count, seed=seed + 1),
            "rejected": sentences(count, seed=seed + 2),
        }
    )


def fit(kind: Any, config: Any, folder: str, *, model: Any = None, data: Any = pairs, **settings: Any) -> Any:
    """Train with one of TRL's trainers and return it, with what an evaluation reports."""
    trainer = kind(
        model=llama() if model is None else model,
        args=config(folder, **{**SETTINGS, **settings}),
        train_dataset=data(24, seed=1),
        eval_dataset=data(7, seed=11),
        processing_class=tokenizer(is_causal=True),
    )
    trainer.train()
    return trainer, trainer.evaluate()


def reward_model() -> Any:
    """Return a tiny Llama that scores texts."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    return LlamaForSequenceClassification(llama_config(LlamaConfig, num_labels=1))
