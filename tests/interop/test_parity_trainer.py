"""Losses, gradient norms and learning rates of each step equal those of transformers' own Trainer.

They differ on purpose in one thing: here a step's gradient is that of the mean over all its items, however they are
split. transformers takes the mean of the micro-batches' means where the model takes no item count; and where the model
takes the count and ignores it (most classifiers and encoder-decoders), it adds the means up. There the reference is the
gradient of the whole step in one batch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import Rows, make_model, make_rows, run_options  # noqa: E402
from torch import nn  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]

STEPS = ("loss", "grad_norm", "learning_rate", "epoch", "step")
LIBRARIES = (hftrain, transformers)


def make_trainer(library: Any, folder: Path, model: nn.Module, rows: Rows, *, kind: Any = None, **options: Any) -> Any:
    """Build either library's Trainer (or `kind`, a function from that to a subclass) from the same settings."""
    parts = {
        key: options.pop(key) for key in ("compute_loss_func", "compute_metrics", "eval_dataset") if key in options
    }
    arguments = library.TrainingArguments(str(folder), **run_options(**options))
    trainer = library.Trainer if kind is None else kind(library.Trainer)
    return trainer(model, arguments, train_dataset=rows, **parts)


def both(folder: Path, name: str, rows: Rows, **options: Any) -> list[Any]:
    trainers = [make_trainer(library, folder, make_model(name), rows, **options) for library in LIBRARIES]
    for trainer in trainers:
        trainer.train()
    return trainers


def steps_of(trainer: Any) -> list[dict[str, Any]]:
    return [{name: entry[name] for name in STEPS} for entry in trainer.state.log_history if "loss" in entry]


def assert_steps_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, rel: float = 1e-6) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx({name: other[name] for name in mine}, rel=rel, abs=1e-12)


def assert_parity(trainers: list[Any]) -> None:
    ours, theirs = trainers
    assert_steps_equal(steps_of(ours), steps_of(theirs))
    # Adam turns a last-bit difference of a small gradient into one of the update, hence the absolute tolerance.
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=1e-4, atol=1e-5)


# -- the same to the last digits ---------------------------------------------------------------------------------------


# 22 samples: the last batch of a pass holds 2; with 3 batches a step there is no short window, with 4 there is.
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("accumulation", [1, 3, 4])
def test_models_that_divide_by_the_item_count(tmp_path, accumulation, schedule):
    options = {"num_train_epochs": 3, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    options |= {"gradient_accumulation_steps": accumulation, "lr_scheduler_type": schedule, "learning_rate": 1e-3}
    trainers = both(tmp_path, "llama", make_rows("llama"), **options)
    assert len(steps_of(trainers[0])) == 3 * math.ceil(6 / accumulation)
    assert_parity(trainers)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_models_without_accumulation(tmp_path, name, schedule):
    options = {"num_train_epochs": 3, "warmup_steps": 4, "weight_decay": 0.1, "max_grad_norm": 0.5}
    options |= {"lr_scheduler_type": schedule, "learning_rate": 1e-3}
    assert_parity(both(tmp_path, name, make_rows(name), **options))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_label_smoothing(tmp_path, name, accumulation):
    # Also of a classifier: the loss is the Trainer's, which divides by the item count.
    options = {"label_smoothing_factor": 0.1, "learning_rate": 1e-3, "gradient_accumulation_steps": accumulation}
    assert_parity(both(tmp_path, name, make_rows(name), **options))


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][..., :-1, :].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[..., 1:].flatten(), reduction="sum")
    return total / ((labels[..., 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_function(tmp_path, accumulation):
    options = {"compute_loss_func": summed_loss, "gradient_accumulation_steps": accumulation, "learning_rate": 1e-3}
    assert_parity(both(tmp_path, "llama", make_rows("llama"), **options))


# -- different on purpose ----------------------------------------------------------------------------------------------


def weighted(trainer: Any) -> Any:
    """Return the older guide's Trainer with a weighted loss, whose `compute_loss` knows no item count."""

    class WeightedTrainer(trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.get("logits")
            loss = (nn.functional.cross_entropy(logits, labels, reduction="none") * WEIGHTS[labels]).mean()
            return (loss, outputs) if return_outputs else loss

    return WeightedTrainer


def weighted_with_count(trainer: Any) -> Any:
    """Return the same Trainer, its signature brought up to date and the count left unused, as most people do it."""

    class WeightedTrainer(weighted(trainer)):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs)

    return WeightedTrainer


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", [weighted, weighted_with_count])
def test_a_subclass_with_a_weighted_loss(tmp_path, kind, accumulation):
    # 22 rows: the last batch of a pass is ragged. Nothing is declared or proved, so it counts as much as the others.
    # transformers 5 passes the count, which the old form refuses.
    rows = make_rows("bert")
    options = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "gradient_accumulation_steps": accumulation}
    ours, theirs = (
        make_trainer(library, tmp_path, make_model("bert"), rows, kind=own, **options)
        for library, own in zip(LIBRARIES, (kind, weighted_with_count), strict=True)
    )
    ours.train()
    theirs.train()
    assert_steps_equal(steps_of(ours), steps_of(theirs), rel=2e-6)


# -- evaluation --------------------------------------------------------------------------------------------------------


def count_right(prediction: Any) -> dict[str, float]:
    predictions, labels = prediction
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    return {"right": float((logits.argmax(-1) == labels).mean()), "spread": float(logits.std())}


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_metrics_and_predictions(tmp_path, name):
    rows = make_rows(name, 10)  # the last batch is ragged
    trainers = [
        make_trainer(library, tmp_path, make_model(name), rows, eval_dataset=rows, compute_metrics=count_right)
        for library in LIBRARIES
    ]
    ours, theirs = ([trainer.evaluate(), trainer.predict(rows)] for trainer in trainers)
    names = {"eval_right", "eval_spread", "eval_loss", "eval_runtime", "epoch"}
    names |= {"eval_samples_per_second", "eval_steps_per_second"}
    assert ours[0].keys() == names
    # transformers 5 also reports how long the model took to place.
    assert theirs[0].keys() - names == {"eval_model_preparation_time"}
    for metric in ("eval_right", "eval_spread"):
        assert ours[0][metric] == pytest.approx(theirs[0][metric], rel=1e-6)
    torch.testing.assert_close(ours[1].predictions, theirs[1].predictions)
    assert (ours[1].label_ids == theirs[1].label_ids).all()
