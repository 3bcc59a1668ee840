"""Metrics that nobody has updated are not reported as if they had measured something."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows

from hftrain import StepOutput, Trainer
from hftrain.task.metric_state import read_metrics

torchmetrics = pytest.importorskip("torchmetrics")


class Group:
    """Other processes, each with the names of its updated metrics."""

    group = None

    def __init__(self, *others: list[str]) -> None:
        self.others = others

    def gather_object(self, mine: Any) -> list[Any]:
        return [mine, *self.others]


class Measured(Task):
    """Holds metrics of which `evaluation_step` updates some."""

    def __init__(self, updates: bool) -> None:
        super().__init__()
        self.updates = updates
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.both = torchmetrics.MetricCollection(
            {name: torchmetrics.classification.MulticlassRecall(3, average=name) for name in ("micro", "macro")}
        )
        self.forgotten = torchmetrics.MeanMetric()

    def evaluation_step(self, batch: Any) -> StepOutput:
        output = self.training_step(batch)
        if self.updates:
            self.accuracy(output.outputs, batch["labels"])
            self.both.update(output.outputs, batch["labels"])
        return output


def test_metric_that_was_never_updated_is_left_out_and_named(tmp_path: Path) -> None:
    trainer = Trainer(Measured(updates=True), make_arguments(tmp_path), eval_dataset=make_rows(6))
    with pytest.warns(UserWarning, match="'forgotten' is left out.*evaluation_step"):
        metrics = trainer.evaluate()
    assert {"eval_accuracy", "eval_micro", "eval_macro"} <= metrics.keys()
    assert "eval_forgotten" not in metrics
    assert metrics == {
        **metrics,
        **{k: v for k, v in trainer.evaluate().items() if k in ("eval_accuracy", "eval_micro")},
    }


def test_training_metric_is_left_out_of_logs_before_its_first_update(tmp_path: Path) -> None:
    class Late(Task):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torchmetrics.MeanMetric()
            self.num_steps = 0

        def metrics(self, stage: str) -> Any:
            return {"seen": self.seen} if stage == "train" else {}

        def training_step(self, batch: Any) -> StepOutput:
            self.num_steps += 1
            if self.num_steps == 2:
                self.seen.update(5.0)
            return super().training_step(batch)

    trainer = Trainer(Late(), make_arguments(tmp_path, max_steps=3), train_dataset=make_rows())
    with pytest.warns(UserWarning, match="'seen' is left out.*training_step"):
        trainer.train()
    assert [entry.get("seen") for entry in trainer.state.log_history if "loss" in entry] == [None, 5.0, None]


def test_rank_without_an_update_takes_part_if_another_has_one() -> None:
    metric = torchmetrics.MeanMetric()
    values = read_metrics({"mean": metric}, stage="evaluation_step", ranks=Group(["mean"]))
    assert values.keys() == {"mean"}


def test_metric_that_does_not_tell_is_computed() -> None:
    class Own:
        def compute(self) -> float:
            return 3.0

        def reset(self) -> None: ...

    assert read_metrics({"own": Own()}, stage="", ranks=Group()) == {"own": 3.0}


class Contrasts(torch.nn.Module):
    """Gives its loss when it is asked to, as CLIP does; takes no labels."""

    def __init__(self, default: bool | None = None) -> None:
        super().__init__()
        self.net = Net()
        self.default = default

    def forward(self, x: torch.Tensor, return_loss: bool | None = None) -> dict[str, torch.Tensor]:
        (logits,) = self.net(x)
        return {"loss": logits.square().mean(), "logits": logits} if return_loss else {"logits": logits}


@pytest.mark.parametrize("asked", [True, False, None])
def test_batch_that_asks_for_the_loss_gives_one_in_evaluations(tmp_path: Path, asked: bool | None) -> None:
    def collate(rows: Any) -> Any:
        return {"x": torch.stack([row["x"] for row in rows]), **({} if asked is None else {"return_loss": asked})}

    trainer = Trainer(Contrasts(), make_arguments(tmp_path), eval_dataset=make_rows(6), data_collator=collate)
    with nullcontext() if asked else pytest.warns(UserWarning, match="has no loss and no metric"):
        assert ("eval_loss" in trainer.evaluate()) == bool(asked)
    found = trainer.predict(make_rows(6))
    assert found.predictions.shape == (6, 3)
    assert ("test_loss" in found.metrics) == bool(asked)


def test_batch_that_asks_for_no_loss_overrules_the_models_default(tmp_path: Path) -> None:
    class ByDefault(Contrasts):
        def forward(self, x: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
            return super().forward(x, return_loss)

    def collate(rows: Any) -> Any:
        return {"x": torch.stack([row["x"] for row in rows]), "return_loss": False}

    trainer = Trainer(ByDefault(), make_arguments(tmp_path), eval_dataset=make_rows(6), data_collator=collate)
    with pytest.warns(UserWarning, match="has no loss and no metric"):
        assert "eval_loss" not in trainer.evaluate()


def test_compute_metrics_of_a_model_without_labels_gets_none(tmp_path: Path) -> None:
    def collate(rows: Any) -> Any:
        return {"x": torch.stack([row["x"] for row in rows]), "return_loss": True}

    trainer = Trainer(
        Contrasts(),
        make_arguments(tmp_path),
        eval_dataset=make_rows(6),
        data_collator=collate,
        compute_metrics=lambda found: {"size": len(found.predictions), "labels": len(found.label_ids)},
    )
    metrics = trainer.evaluate()
    assert (metrics["eval_size"], metrics["eval_labels"]) == (6, 0)
