"""TRL's trainers that generate their answers: GRPO and RLOO."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, llama, sentences, tokenizer


def longer(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward answers by their numbers of different words."""
    return [float(len(set(text.split()))) for text in completions]


def fit(kind: Any, config: Any, folder: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Train with one of TRL's trainers and return it, with what an evaluation reports."""
    args = config(
        folder,
        **{
            **ARGUMENTS,
            "bf16": False,
            "num_generations": 2,
            "max_completion_length": 6,
            "gradient_accumulation_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 3,
            **settings,
        },
    )
    trainer = kind(
        model=llama(),
        args=args,
        reward_funcs=longer,
        train_dataset=Dataset.from_dict({"prompt": [text + " " for text in sentences(24, seed=1)]}),
        eval_dataset=Dataset.from_dict({"prompt": [text + " " for text in sentences(4, seed=2)]}),
        processing_class=tokenizer(is_causal=True),
        callbacks=[SeedEachStep()],
    )
    trainer.train()
    return trainer, trainer.evaluate()
