"""Classify the sentiment of movie reviews with a transformers model in a TaskModule.

python examples/text_classifier.py
torchrun --nproc_per_node 2 examples/text_classifier.py --precision bf16
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from reviews import load_reviews, make_model, make_tokenizer
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score
from transformers import DataCollatorWithPadding

from hftrain import EarlyStoppingCallback, StepOutput, SummaryCallback, TaskModule, Trainer, TrainingArguments, set_seed


class SentimentTask(TaskModule):
    """A sequence classifier with its own loss, accuracy and F1 score."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.accuracy = BinaryAccuracy()
        self.f1 = BinaryF1Score()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy, which the model computes from the labels."""
        return self.model(**batch).loss

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """Return loss and logits, and update the metrics."""
        output = self.model(**batch)
        predictions = output.logits.argmax(dim=-1)
        self.accuracy.update(predictions, batch["labels"])
        self.f1.update(predictions, batch["labels"])
        return StepOutput(loss=output.loss, outputs=output.logits, labels=batch["labels"])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/text_classifier")
    parser.add_argument("--precision", default=None, help="fp32, bf16, fp16, tf32")
    parser.add_argument("--epochs", type=float, default=10)
    return parser.parse_args()


def main() -> None:
    """Train with early stopping, keep the best model, and test it."""
    options = parse()
    set_seed(42)
    # With a real data set and model:
    #   data = datasets.load_dataset("rotten_tomatoes")
    #   tokenizer = AutoTokenizer.from_pretrained("distilbert-base-uncased")
    #   model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=2)
    data = load_reviews()
    tokenizer = make_tokenizer(data["train"]["text"])
    model = make_model(tokenizer)

    def encode(rows: dict[str, Any]) -> dict[str, Any]:
        return {**tokenizer(rows["text"], truncation=True), "labels": rows["label"]}

    encoded = data.map(encode, batched=True, remove_columns=["text", "label"])
    trainer = Trainer(
        SentimentTask(model),
        TrainingArguments(
            options.output_dir,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=128,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            logging_steps=25,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            greater_is_better=True,
            report_to="none",
        ),
        train_dataset=encoded["train"],
        eval_dataset=encoded["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2), SummaryCallback()],
        precision=options.precision,
    )
    trainer.train()
    metrics = trainer.evaluate(encoded["test"], metric_key_prefix="test")
    print(f"test: accuracy {metrics['test_accuracy']:.3f}, F1 {metrics['test_f1']:.3f}")


if __name__ == "__main__":
    main()
