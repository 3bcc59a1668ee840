"""adapters: AdapterTrainer, which trains and saves adapters alone."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, fit, sentences, tokenizer


def rows(count: int, seed: int) -> Dataset:
    """Return tokenized texts of two classes."""
    tool = tokenizer()
    made = [tool(text) for text in sentences(count, seed=seed)]
    return Dataset.from_list([{**each, "labels": len(each["input_ids"]) % 2} for each in map(dict, made)])


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train one adapter; load the best checkpoint at the end."""
    from adapters import AdapterTrainer, AutoAdapterModel, BertAdapterModel  # noqa: F401
    from transformers import TrainingArguments

    torch.manual_seed(0)
    model = BertAdapterModel(bert_config())
    model.add_adapter("task", config="seq_bn")
    model.add_classification_head("task", num_labels=2)
    model.train_adapter("task")
    trainer = AdapterTrainer(
        model=model,
        args=TrainingArguments(folder, **{**ARGUMENTS, **settings}, load_best_model_at_end=True, max_grad_norm=0.5),
        train_dataset=rows(26, 1),
        eval_dataset=rows(10, 2),
        processing_class=tokenizer(),
        callbacks=[SeedEachStep()],
    )
    return fit(trainer)
