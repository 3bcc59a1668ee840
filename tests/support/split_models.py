"""What the tests of strategies that split a model share: what a run gives, and evaluations on few samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, assert_trained
from support.tiny import Stream, make_arguments, make_rows, share
from torch import nn

from hftrain import StepOutput, TaskModule, Trainer, set_seed
from hftrain.checkpoint.weights import read_weights


def make_trainer(
    folder: str, model: nn.Module | None, *, rows: int, stop: int | None = None, strategy: Any = None,
    precision: Any = None, model_init: Any = None, **options: Any,
) -> Trainer:  # fmt: skip
    """Return a Trainer that evaluates on seven samples, and stops after `stop` steps."""
    data = {"train_dataset": make_rows(rows), "eval_dataset": make_rows(7, seed=2)}
    parts = {"strategy": strategy, "precision": precision, "model_init": model_init}
    return Trainer(model, make_arguments(Path(folder), **options), callbacks=[StopAt(stop)], **data, **parts)


def best_comes_back(trainer: Trainer) -> bool:
    """Train with `load_best_model_at_end`; tell whether the weights at the end are those of an earlier checkpoint."""
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None
    assert not best.endswith("-8")
    expected = read_weights(Path(best))
    found = trainer.strategy.model_state(trainer.model_wrapped)
    return all(torch.equal(value, expected[name]) for name, value in found.items())


def told(trainer: Trainer) -> dict[str, Any]:
    """Return what a run logged, and what the model has learnt (in the main process)."""
    assert_trained(trainer.state.log_history)
    state = trainer.strategy.model_state(trainer.model_wrapped)
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {
        "history": [
            {name: entry[name] for name in names if name in entry}
            for entry in trainer.state.log_history
            if "train_loss" not in entry
        ],
        "weights": {name: value.float().flatten().tolist() for name, value in state.items()},
    }


def close(ours: dict[str, Any], theirs: dict[str, Any], rel: float = 1e-5, *, has_norm: bool = True) -> None:
    assert len(ours["history"]) == len(theirs["history"])
    for left, right in zip(ours["history"], theirs["history"], strict=True):
        right = {name: value for name, value in right.items() if has_norm or name in left or name != "grad_norm"}
        assert left == pytest.approx(right, rel=rel, abs=1e-6)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, values in ours["weights"].items():
        assert values == pytest.approx(theirs["weights"][name], rel=rel, abs=1e-5), name


class Judged(TaskModule):
    """The same model as a task, whose metric would count a sample too many."""

    def __init__(self, model: nn.Module) -> None:
        import torchmetrics

        super().__init__(model)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(**batch)
        return StepOutput(loss=loss, outputs=logits, labels=batch["labels"])

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(batch["x"], labels=batch["labels"])
        self.accuracy.update(logits, batch["labels"])
        return StepOutput(loss=loss, outputs=logits, labels=batch["labels"], logs={"mean": logits.mean()})


def evaluate(kind: type[nn.Module], folder: str, *, strategy: str | None, most: int = 17, **options: Any) -> list[Any]:
    """Train, evaluating after each step; then evaluate and predict on 1 to `most` samples, sized and streamed."""
    arguments = make_arguments(
        Path(folder), per_device_eval_batch_size=2, eval_strategy="steps", eval_steps=1,
        per_device_train_batch_size=4 if strategy is None else 2, metric_for_best_model="accuracy", **options,
    )  # fmt: skip
    set_seed(3)
    # The rehearsal of the metric, and the evaluation while training: on one sample, so that ranks are without any.
    task = Trainer(
        Judged(kind()), arguments, train_dataset=make_rows(8), eval_dataset=make_rows(1, seed=2), strategy=strategy
    )
    task.train()
    answers: list[Any] = [[entry["eval_loss"] for entry in task.state.log_history if "eval_loss" in entry]]
    plain = make_arguments(Path(folder), per_device_eval_batch_size=2)
    documented = Trainer(task.model, plain, compute_metrics=share, strategy=task.strategy if strategy else None)
    for number in range(1, most + 1):
        rows = make_rows(number, seed=number)
        for data in (rows, Stream(rows)):
            metrics, judged = documented.evaluate(data), task.evaluate(data)
            prediction = documented.predict(data)
            kept = {k: v for k, v in {**metrics, **judged}.items() if not k.endswith(("second", "time", "mean"))}
            answers.append([kept, prediction.predictions.tolist(), prediction.label_ids.tolist()])
    return answers


def check_evaluated(found: list[Any], alone: list[Any]) -> None:
    """Compare the results of `evaluate` of several processes with those of one."""
    assert found[0] == pytest.approx(alone[0], rel=1e-5)
    for ours, theirs in zip(found[1:], alone[1:], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert ours[2] == theirs[2]
        torch.testing.assert_close(torch.tensor(ours[1]), torch.tensor(theirs[1]), rtol=1e-4, atol=1e-5)
