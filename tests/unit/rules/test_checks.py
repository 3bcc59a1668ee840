"""What the rules take and return; tests/unit/trainer/test_bad_input.py has what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows
from torch import nn

from hftrain import TaskModule, Trainer
from hftrain.rules.evaluation import best_metric_key
from hftrain.rules.task import read_optimizers


def test_model_beside_model_init_is_there_until_training(tmp_path: Path) -> None:
    given, made = Net(), []

    def make() -> Net:
        made.append(Net())
        return made[-1]

    with pytest.warns(UserWarning, match=r"Both model and model_init are set: train\(\) replaces model"):
        trainer = Trainer(given, make_arguments(tmp_path, max_steps=1), train_dataset=make_rows(4), model_init=make)
    assert trainer.model is given
    assert not made
    trainer.train()
    assert [trainer.model] == made


sgd = torch.optim.SGD(Net().parameters(), lr=0.1)

schedule_of_sgd = torch.optim.lr_scheduler.StepLR(sgd, 1)


class Own(TaskModule):
    def __init__(self, made: Any) -> None:
        super().__init__(nn.Linear(1, 1))
        self.made = made

    def configure_optimizers(self) -> Any:
        return self.made


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (None, (None, None)),
        (sgd, (sgd, None)),
        ((sgd, schedule_of_sgd), (sgd, schedule_of_sgd)),
        ([sgd, None], (sgd, None)),
        ({"optimizer": sgd}, (sgd, None)),
        ((None, None), (None, None)),
    ],
)
def test_task_gives_an_optimizer_or_a_pair(made: Any, expected: Any) -> None:
    assert read_optimizers(Own(made)) == expected


@pytest.mark.parametrize(
    ("metric", "key"), [("loss", "eval_loss"), ("eval_loss", "eval_loss"), ("evaluation", "eval_evaluation")]
)
def test_metric_is_known_with_and_without_its_prefix(metric: str, key: str) -> None:
    assert best_metric_key(metric) == key
