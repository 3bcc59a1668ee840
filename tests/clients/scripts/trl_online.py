"""TRL's trainers that generate their answers, on a tiny Llama."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, fit, llama, lora, sentences, tokenizer


def longer(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward answers by their numbers of different words."""
    return [float(len(set(text.split()))) for text in completions]


def prompts(count: int, *, seed: int) -> Dataset:
    """Return prompts."""
    return Dataset.from_dict({"prompt": [text + " " for text in sentences(count, seed=seed)]})


def trained(kind: Any, config: Any, folder: str, *, more: Any = None, **settings: Any) -> Any:
    """Train with one of TRL's trainers and return what an evaluation reports."""
    args = config(folder, **{**ARGUMENTS, "bf16": False, "num_generations": 2, "max_completion_length": 6, **settings})
    return fit(
        kind(
            model=llama(),
            args=args,
            reward_funcs=longer,
            train_dataset=prompts(24, seed=1),
            eval_dataset=prompts(4, seed=2),
            processing_class=tokenizer(is_causal=True),
            callbacks=[SeedEachStep()],
            **(more or {}),
        )
    )


def grpo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on groups of generated answers."""
    from trl import GRPOConfig, GRPOTrainer

    return trained(GRPOTrainer, GRPOConfig, folder, **settings)


def grpo_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on groups of generated answers."""
    from trl import GRPOConfig, GRPOTrainer

    return trained(GRPOTrainer, GRPOConfig, folder, more=lora(), **settings)


def rloo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on generated answers, each against the others."""
    from trl import RLOOConfig, RLOOTrainer

    return trained(RLOOTrainer, RLOOConfig, folder, **settings)


def rloo_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on generated answers."""
    from trl import RLOOConfig, RLOOTrainer

    return trained(RLOOTrainer, RLOOConfig, folder, more=lora(), **settings)
