"""Overrides that evaluate in their own way, as the question-answering examples and preference trainers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer, TrainerCallback

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 4,
    "load_best_model_at_end": True,
    "metric_for_best_model": "bleu",
}


def test_evaluation_loop_called_while_training_changes_no_number(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        trainer: Trainer

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            loader = self.trainer.get_eval_dataloader(make_rows(6, 3))
            self.trainer.evaluation_loop(loader, "Looking")

    def run(callbacks: list[Looks]) -> list[float]:
        torch.manual_seed(1)
        trainer = Trainer(Net(0.5), make_arguments(tmp_path), train_dataset=make_rows(), callbacks=callbacks)
        for callback in callbacks:
            callback.trainer = trainer
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert run([Looks()]) == run([])


class InEvaluate(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().evaluate(*args, **kwargs), "eval_bleu": 1.0}


class InLoop(Trainer):
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_bleu"] = 1.0
        return output


class InLog(Trainer):
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "eval_loss" in logs:
            logs["eval_bleu"] = 1.0
        super().log(logs, start_time)


@pytest.mark.parametrize("kind", [InEvaluate, InLoop, InLog])
@pytest.mark.parametrize("compute_metrics", [None, lambda p: {"mean": float(p.predictions.mean())}])
def test_metric_that_an_override_adds_picks_the_best_model(
    tmp_path: Path, kind: type[Trainer], compute_metrics: Any
) -> None:
    arguments = make_arguments(tmp_path, **BEST)
    trainer = kind(
        Net(), arguments, train_dataset=make_rows(), eval_dataset=make_rows(4, 2), compute_metrics=compute_metrics
    )
    trainer.train()
    assert trainer.state.best_metric == 1.0
