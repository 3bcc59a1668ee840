"""MLflow: `mlflow.transformers.autolog()`, which replaces `Trainer.train` and adds a callback that logs."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, fit, sentences, tokenizer


def rows(count: int, seed: int) -> Dataset:
    """Return tokenized texts of two classes."""
    tool = tokenizer()
    made = [dict(tool(text)) for text in sentences(count, seed=seed)]
    return Dataset.from_list([{**each, "labels": len(each["input_ids"]) % 2} for each in made])


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train a classifier; return what MLflow has recorded."""
    import mlflow
    import mlflow.transformers
    from transformers import BertForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

    mlflow.set_tracking_uri("sqlite:///runs.db")
    mlflow.transformers.autolog()
    torch.manual_seed(0)
    trainer = Trainer(
        model=BertForSequenceClassification(bert_config(num_labels=2)),
        args=TrainingArguments(folder, **{**ARGUMENTS, "report_to": "mlflow", **settings}),
        train_dataset=rows(26, 1),
        eval_dataset=rows(10, 2),
        data_collator=DataCollatorWithPadding(tokenizer()),
        callbacks=[SeedEachStep()],
    )
    found = fit(trainer)
    run = mlflow.last_active_run()
    names = sorted(name for name in run.data.metrics if name in ("loss", "learning_rate", "eval_loss"))
    mlflow.end_run()
    return {**found, **{f"recorded_{name}": run.data.metrics[name] for name in names}}
