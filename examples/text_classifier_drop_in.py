"""Classify the sentiment of movie reviews in the style of the Hugging Face Trainer.

The script runs with either library: change the import line below to `from transformers import ...`.

python examples/text_classifier_drop_in.py
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from reviews import load_reviews, make_model, make_tokenizer
from sklearn.metrics import accuracy_score, f1_score
from transformers import DataCollatorWithPadding

from hftrain import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed


def compute_metrics(evaluation: Any) -> dict[str, float]:
    """Return accuracy and F1 of the logits, shape (samples, 2)."""
    logits, labels = evaluation
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": accuracy_score(labels, predictions), "f1": f1_score(labels, predictions)}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/text_classifier_drop_in")
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

    encoded = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
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
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    metrics = trainer.evaluate(encoded["test"], metric_key_prefix="test")
    print(f"test: accuracy {metrics['test_accuracy']:.3f}, F1 {metrics['test_f1']:.3f}")


if __name__ == "__main__":
    main()
