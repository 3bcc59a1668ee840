"""What a logging window has gathered survives a checkpoint within it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import Task, make_arguments, make_rows
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from hftrain import StepOutput, Trainer, set_seed


class Measuring(Task):
    """Measures its training steps, and says something of its own."""

    def __init__(self, metric: Any) -> None:
        super().__init__(dropout=0.2)
        self.measured = metric

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(**batch)
        self.measured.update(logits, batch["labels"])
        return StepOutput(loss=loss, logs={"spread": logits.std()})

    def metrics(self, stage: str) -> dict[str, Any]:
        return {"measured": self.measured} if stage == "train" else {}


def train(folder: Path, metric: Any, *, stop: int | None = None, resume: bool = False) -> list[dict[str, Any]]:
    set_seed(1)
    arguments = make_arguments(folder, logging_steps=4, save_strategy="steps", save_steps=100, max_steps=8)
    trainer = Trainer(Measuring(metric), arguments, train_dataset=make_rows(), callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "make",
    [
        lambda: MulticlassAccuracy(3),
        lambda: MetricCollection([MulticlassAccuracy(3), MulticlassRecall(3, average="micro")]),
    ],
)
@pytest.mark.parametrize("stop", [2, 4, 7])
def test_training_metrics_resume_within_a_window(tmp_path: Path, make: Any, stop: int) -> None:
    whole = train(tmp_path / "whole", make())
    train(tmp_path / "parts", make(), stop=stop)
    assert train(tmp_path / "parts", make(), resume=True) == whole


def test_training_metric_that_starts_anew_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Spread(MeanMetric):
        def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[override]
            super().update(logits.std())

    make = lambda: MinMaxMetric(Spread())  # noqa: E731
    train(tmp_path, make(), stop=2)
    assert "measured" not in caplog.text
    train(tmp_path, make(), resume=True)
    assert "had accumulated since the last log: measured" in caplog.text
