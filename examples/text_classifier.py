"""Classify the sentiment of movie reviews with a transformers model in a TaskModule.

python examples/text_classifier.py
torchrun --nproc_per_node 2 examples/text_classifier.py
"""

from __future__ import annotations

from typing import Any

import torch
from reviews import load_reviews, make_model, make_tokenizer
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score
from transformers import DataCollatorWithPadding

from hftrain import EarlyStoppingCallback, StepOutput, SummaryCallback, TaskModule, Trainer, TrainingArguments, set_seed

# %% data
set_seed(42)
# yours: data = datasets.load_dataset("rotten_tomatoes")
data = load_reviews()
# yours: tokenizer = AutoTokenizer.from_pretrained("distilbert-base-uncased")
tokenizer = make_tokenizer(data["train"]["text"])


def encode(rows: dict[str, Any]) -> dict[str, Any]:
    """Add the tokens of some reviews."""
    return {**tokenizer(rows["text"], truncation=True), "labels": rows["label"]}


encoded = data.map(encode, batched=True, remove_columns=["text", "label"])


# %% task
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

    def prediction_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of reviews without labels."""
        return self.model(**batch).logits


# %% train
# yours: model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=2)
model = make_model(tokenizer)
trainer = Trainer(
    SentimentTask(model),
    TrainingArguments(
        "runs/text_classifier",
        num_train_epochs=3,
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
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=encoded["train"],
    eval_dataset=encoded["validation"],
    data_collator=DataCollatorWithPadding(tokenizer),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2), SummaryCallback()],
)
trainer.train()

# %% test
metrics = trainer.evaluate(encoded["test"], metric_key_prefix="test")
print(f"test: accuracy {metrics['test_accuracy']:.3f}, F1 {metrics['test_f1']:.3f}")

# %% samples
reviews = [
    "the plot was dull but the music was warm",
    "the music was warm but the plot was dull",
    "the cast was not dull",
]
samples = [tokenizer(review) for review in reviews]
for review, logits in zip(reviews, trainer.predict(samples).predictions, strict=True):
    print("positive" if logits.argmax() else "negative", "|", review)
