"""What the rules take and return; tests/unit/trainer/test_bad_input.py has what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows
from torch import nn
from torchmetrics import MeanMetric

from hftrain import TaskModule, Trainer
from hftrain.rules.constructor import check_parts
from hftrain.rules.data import check_eval_data
from hftrain.rules.evaluation import best_metric_key, check_best_metric
from hftrain.rules.functions import check_optimizer, read_optimizers
from hftrain.rules.task import check_task
from hftrain.task.model_task import ModelTask

# -- model -----------------------------------------------------------------------------------------------------------


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


# -- parts -----------------------------------------------------------------------------------------------------------


def make_parts(**parts: Any) -> dict[str, Any]:
    return {
        "model_init": None,
        "optimizers": (None, None),
        "optimizer_cls_and_kwargs": None,
        "functions": {},
        **parts,
    }


sgd = torch.optim.SGD(Net().parameters(), lr=0.1)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"optimizers": (sgd, None)},
        {"model_init": Net, "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        {"optimizers": (None, object()), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        {"functions": {"data_collator": list}},
    ],
)
def test_parts_that_agree_pass(parts: dict[str, Any]) -> None:
    check_parts(**make_parts(**parts))


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "dataset", "has_own_loader"), [("no", None, False), ("epoch", [1], False), ("epoch", None, True)]
)
def test_evaluations_with_data_or_without_a_plan_pass(
    tmp_path: Path, strategy: str, dataset: Any, has_own_loader: bool
) -> None:
    args = make_arguments(tmp_path, eval_strategy=strategy)
    check_eval_data(args, dataset, has_own_loader=has_own_loader)


# -- optimizers ------------------------------------------------------------------------------------------------------


def test_optimizer_and_schedule_that_belong_together_pass() -> None:
    model = Net()
    optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    for schedule in (None, torch.optim.lr_scheduler.StepLR(optimizer, 1), object()):
        check_optimizer(optimizer, schedule, model)


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


# -- task ------------------------------------------------------------------------------------------------------------


class Outside(TaskModule):
    """Hold a parameter next to the model."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__(Net())
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=trains)
        self.mean = MeanMetric()


@pytest.mark.parametrize("task", [Task(), Outside(trains=False), ModelTask(Net())])
def test_task_that_keeps_its_side_passes(task: TaskModule) -> None:
    check_task(task)


# -- the metric that picks the best model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "task", "compute_metrics", "eval_dataset"),
    [
        (None, ModelTask(Net()), None, []),
        ("loss", ModelTask(Net()), None, []),
        ("eval_loss", ModelTask(Net()), None, []),
        ("a_loss", ModelTask(Net()), None, {"a": []}),
        ("f1", ModelTask(Net()), dict, []),
        ("f1", Task(), None, []),
        ("f1", ModelTask(Net()), dict, {"a": []}),
    ],
)
def test_metric_that_may_come_passes(
    tmp_path: Path, metric: str | None, task: TaskModule, compute_metrics: Any, eval_dataset: Any
) -> None:
    args = make_arguments(tmp_path, metric_for_best_model=metric)
    check_best_metric(args, task=task, compute_metrics=compute_metrics, eval_dataset=eval_dataset)


@pytest.mark.parametrize(
    ("metric", "key"), [("loss", "eval_loss"), ("eval_loss", "eval_loss"), ("evaluation", "eval_evaluation")]
)
def test_metric_is_known_with_and_without_its_prefix(metric: str, key: str) -> None:
    assert best_metric_key(metric) == key
