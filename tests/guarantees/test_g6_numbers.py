"""G6: `eval_loss` is the mean over items, whatever the batch size; a NaN is shown. Data ranks: tests/distributed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows, on_tensor_ranks
from torch import nn

from hftrain import Trainer, TrainerCallback
from hftrain.strategies.registry import create_strategy

NUM_SAMPLES, LENGTH, NUM_CLASSES = 11, 5, 8


class Tagger(nn.Module):
    """A class for each token; the loss is the mean over those whose label is not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, NUM_CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits_BLV = self.layer(x)
        if labels is None:
            return {"logits": logits_BLV}
        return {"loss": nn.functional.cross_entropy(logits_BLV.flatten(0, 1), labels.flatten()), "logits": logits_BLV}


def make_sentences() -> list[dict[str, torch.Tensor]]:
    """Return sentences of one to five labelled tokens."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(NUM_SAMPLES):
        labels = torch.randint(NUM_CLASSES, (LENGTH,), generator=generator)
        labels[1 + index % LENGTH :] = -100
        rows.append({"x": torch.randn(LENGTH, 3, generator=generator), "labels": labels})
    return rows


class Repair(TrainerCallback):
    """Keep NaN gradients from the weights."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            parameter.grad.nan_to_num_(nan=0.0)


@pytest.mark.parametrize("makes_model_divide", [False, True], ids=["model's own mean", "loss function with a count"])
def test_eval_loss_is_the_mean_over_items_for_every_batch_size(tmp_path: Path, makes_model_divide: bool) -> None:
    torch.manual_seed(0)
    model, rows = Tagger(), make_sentences()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    expected = model(**batch)["loss"].item()
    own: dict[str, Any] = {}
    if makes_model_divide:

        def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            total = nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
            return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)

        own["compute_loss_func"] = loss_of
    losses = []
    for size in range(1, NUM_SAMPLES + 2):
        trainer = Trainer(model, make_arguments(tmp_path, per_device_eval_batch_size=size), eval_dataset=rows, **own)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx([expected] * len(losses), rel=1e-6)


def assert_nan_is_told(folder: Path, **options: Any) -> None:
    rows = make_rows(12)
    rows[5]["x"] = torch.full_like(rows[5]["x"], math.nan)
    arguments = make_arguments(folder, learning_rate=0.0, weight_decay=0.0, num_train_epochs=1, logging_steps=3)
    trainer = Trainer(Net(), arguments, train_dataset=rows, callbacks=[Repair], **options)
    with pytest.warns(UserWarning, match="NaN or infinite at least once"):
        result = trainer.train()
    assert result.metrics["nonfinite_losses"] == 1
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def test_nan_is_counted_and_said_while_the_log_line_is_smoothed(tmp_path: Path) -> None:
    assert_nan_is_told(tmp_path)


def on_two_ranks(folder: str) -> list[float]:
    """Evaluate in batches of every size, and train over a NaN, while tensor ranks share the layers."""
    losses = []
    for size in range(1, NUM_SAMPLES + 2):
        torch.manual_seed(0)
        arguments = make_arguments(Path(folder), per_device_eval_batch_size=size)
        strategy = create_strategy("tp", use_cpu=True, plan={"layer": "colwise_gather_output"})
        trainer = Trainer(Tagger(), arguments, eval_dataset=make_sentences(), strategy=strategy)
        losses.append(trainer.evaluate()["eval_loss"])
    assert_nan_is_told(Path(folder), strategy=on_tensor_ranks())
    return losses


@pytest.mark.distributed
def test_numbers_of_tensor_ranks_are_those_of_one_process(tmp_path: Path, run_distributed: Any) -> None:
    torch.manual_seed(0)
    arguments = make_arguments(tmp_path, per_device_eval_batch_size=NUM_SAMPLES)
    expected = Trainer(Tagger(), arguments, eval_dataset=make_sentences()).evaluate()["eval_loss"]
    for losses in run_distributed(on_two_ranks, folder=str(tmp_path)):
        assert losses == pytest.approx([expected] * (NUM_SAMPLES + 1), rel=1e-6)
