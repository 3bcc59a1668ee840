"""TRL: SFTTrainer on a tiny Llama."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import ARGUMENTS, llama, num_to_evaluate, sentences, tokenizer


def train(folder: str) -> tuple[Any, dict[str, Any]]:
    """Train on texts, with accumulation and evaluations."""
    from trl import SFTConfig, SFTTrainer

    # Before the arguments, which form the process group: transformers saves on the main process then.
    model = llama()
    args = SFTConfig(
        folder,
        **ARGUMENTS,
        eval_strategy="steps",
        eval_steps=3,
        gradient_accumulation_steps=2,
        max_length=16,
        bf16=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"text": sentences(30, seed=1)}),
        eval_dataset=Dataset.from_dict({"text": sentences(num_to_evaluate(9), seed=2)}),
        processing_class=tokenizer(is_causal=True),
    )
    trainer.train()
    return trainer, trainer.evaluate()
