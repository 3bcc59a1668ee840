"""Everything that can be refused before a device or process group is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Stream, Task, make_arguments, make_rows
from torch import nn
from torchmetrics import MeanMetric

from hftrain import ConfigError, TaskError, TaskModule, Trainer
from hftrain.rules.data import check_eval_data, check_train_data
from hftrain.rules.evaluation import best_metric_key, check_best_metric
from hftrain.rules.optimizer import check_optimizer, read_optimizers
from hftrain.rules.parts import check_arguments, check_model, check_parts
from hftrain.rules.task import check_task, check_unused_by_task
from hftrain.task.model_task import ModelTask


class Strange:
    """Looks like arguments."""

    output_dir = "out"


@pytest.mark.parametrize("args", [Strange(), {"output_dir": "out"}, "out"])
def test_arguments_of_another_library_are_refused(args: Any) -> None:
    with pytest.raises(ConfigError, match=f"{type(args).__qualname__} was given as args.*Import TrainingArguments"):
        check_arguments(args)


def test_own_arguments_pass(tmp_path: Path) -> None:
    check_arguments(make_arguments(tmp_path))


# -- model -----------------------------------------------------------------------------------------------------------


def test_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="without model and without model_init"):
        check_model(None, None)


def test_model_init_must_be_callable() -> None:
    with pytest.raises(ConfigError, match=r"model_init was given\. It cannot be called"):
        check_model(None, 3)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Net, r"The class Net was given as model.*Pass Net\(\.\.\.\)"),
        ("bert-base", "A str was given as model"),
        (lambda: Net(), "A function was given as model"),
    ],
)
def test_model_must_be_a_module(tmp_path: Path, model: Any, named: str) -> None:
    with pytest.raises(TaskError, match=named):
        Trainer(model, make_arguments(tmp_path))


def test_model_beside_model_init_is_there_until_training(tmp_path: Path) -> None:
    given, made = Net(), []

    def make() -> Net:
        made.append(Net())
        return made[-1]

    with pytest.warns(UserWarning, match=r"model and model_init were given: train\(\) replaces model"):
        trainer = Trainer(given, make_arguments(tmp_path, max_steps=1), train_dataset=make_rows(4), model_init=make)
    assert trainer.model is given
    assert not made
    trainer.train()
    assert [trainer.model] == made


@pytest.mark.parametrize(("model", "model_init"), [(Net(), None), (None, Net), (Task(), None)])
def test_one_way_to_a_model_passes(model: Any, model_init: Any) -> None:
    check_model(model, model_init)


# -- parts -----------------------------------------------------------------------------------------------------------


def make_parts(**parts: Any) -> dict[str, Any]:
    return {"model_init": None, "optimizers": (None, None), "optimizer_cls_and_kwargs": None, "collator": None, **parts}


sgd = torch.optim.SGD(Net().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model_init": Net, "optimizers": (sgd, None)}, r"optimizers=\(\.\.\.\) was given together with model_init"),
        (
            {"model_init": Net, "optimizers": (None, object())},
            r"optimizers=\(\.\.\.\) was given together with model_init",
        ),
        (
            {"optimizers": (sgd, None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
            "together with optimizer_cls_and_kwargs",
        ),
        ({"collator": 3}, r"Cannot use a int as data_collator: it is not callable"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parts(**make_parts(**parts))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"optimizers": (sgd, None)},
        {"model_init": Net, "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        {"optimizers": (None, object()), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        {"collator": list},
    ],
)
def test_parts_that_agree_pass(parts: dict[str, Any]) -> None:
    check_parts(**make_parts(**parts))


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "dataset"), [("steps", None), ("epoch", None), ("epoch", {})])
def test_evaluations_need_data(tmp_path: Path, strategy: str, dataset: Any) -> None:
    args = make_arguments(tmp_path, eval_strategy=strategy)
    with pytest.raises(ConfigError, match=f"eval_strategy='{strategy}' was asked for. There is no eval_dataset"):
        check_eval_data(args, dataset, has_own_loader=False)


@pytest.mark.parametrize(
    ("strategy", "dataset", "has_own_loader"), [("no", None, False), ("epoch", [1], False), ("epoch", None, True)]
)
def test_evaluations_with_data_or_without_a_plan_pass(
    tmp_path: Path, strategy: str, dataset: Any, has_own_loader: bool
) -> None:
    args = make_arguments(tmp_path, eval_strategy=strategy)
    check_eval_data(args, dataset, has_own_loader=has_own_loader)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(None, "There is no train_dataset"), ([], "train_dataset is empty"), (Stream(make_rows()), "without __len__")],
)
def test_training_needs_data_and_an_end(tmp_path: Path, dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_train_data(make_arguments(tmp_path), dataset)


@pytest.mark.parametrize(("dataset", "max_steps"), [(make_rows(), -1), (Stream(make_rows()), 5)])
def test_data_with_an_end_passes(tmp_path: Path, dataset: Any, max_steps: int) -> None:
    check_train_data(make_arguments(tmp_path, max_steps=max_steps), dataset)


@pytest.mark.parametrize(("dataset", "name"), [([], "eval_dataset"), ({"a": [1], "b": []}, "b")])
def test_evaluations_on_an_empty_set_are_refused(tmp_path: Path, dataset: Any, name: str) -> None:
    check_eval_data(make_arguments(tmp_path), dataset, has_own_loader=False)
    with pytest.raises(ConfigError, match=rf"eval_strategy='epoch' was asked for\. {name} is empty"):
        check_eval_data(make_arguments(tmp_path, eval_strategy="epoch"), dataset, has_own_loader=False)


@pytest.mark.parametrize("dataset", [[1], {"a": [1], "b": Stream(make_rows())}])
def test_evaluations_on_samples_pass(tmp_path: Path, dataset: Any) -> None:
    check_eval_data(make_arguments(tmp_path, eval_strategy="epoch"), dataset, has_own_loader=False)


# -- optimizers ------------------------------------------------------------------------------------------------------


def test_optimizer_must_hold_parameters_of_the_model() -> None:
    with pytest.raises(ConfigError, match=r"Net was to be trained with a SGD\. .* none of the model's parameters"):
        check_optimizer(sgd, None, Net())


def test_schedule_must_drive_the_optimizer_that_trains() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"A StepLR was to drive the learning rate.*another optimizer"):
        check_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(sgd, 1), model)


def test_optimizer_and_schedule_that_belong_together_pass() -> None:
    model = Net()
    optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    for schedule in (None, torch.optim.lr_scheduler.StepLR(optimizer, 1), object()):
        check_optimizer(optimizer, schedule, model)


schedule_of_sgd = torch.optim.lr_scheduler.StepLR(sgd, 1)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (None, (None, None)),
        (sgd, (sgd, None)),
        ((sgd, schedule_of_sgd), (sgd, schedule_of_sgd)),
        ([sgd, None], (sgd, None)),
        ((None, None), (None, None)),
    ],
)
def test_task_gives_an_optimizer_or_a_pair(made: Any, expected: Any) -> None:
    assert read_optimizers(made, maker="Own") == expected


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (3, r"It returned a int\."),
        ((sgd, sgd), r"a tuple of \(SGD, SGD\)"),
        ([sgd], r"a list of \(SGD\)"),
        (([sgd], [schedule_of_sgd]), r"a tuple of \(list, list\)"),
        ({"optimizer": sgd}, r"a dict\."),
    ],
)
def test_task_that_gives_something_else_is_named(made: Any, named: str) -> None:
    with pytest.raises(TaskError, match=f"Own.configure_optimizers was called.*{named}"):
        read_optimizers(made, maker="Own")


# -- task ------------------------------------------------------------------------------------------------------------


class Outside(TaskModule):
    """Hold a parameter beside the model."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__(Net())
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=trains)
        self.mean = MeanMetric()


def test_task_needs_a_child_called_model() -> None:
    with pytest.raises(TaskError, match=r"TaskModule was given as the task\. It has no child called 'model'"):
        check_task(TaskModule())


def test_trainable_parameters_belong_into_the_model() -> None:
    with pytest.raises(TaskError, match=r"Outside .* outside its model \(temperature\)"):
        check_task(Outside(trains=True))


@pytest.mark.parametrize("task", [Task(), Outside(trains=False), ModelTask(Net())])
def test_task_that_keeps_its_side_passes(task: TaskModule) -> None:
    check_task(task)


@pytest.mark.parametrize(
    ("options", "func", "named"),
    [
        ({"label_smoothing_factor": 0.1}, None, "label_smoothing_factor"),
        ({"label_names": ["y"]}, None, "label_names"),
        ({}, len, "compute_loss_func"),
        ({"label_names": ["y"]}, len, "compute_loss_func, label_names"),
    ],
)
def test_settings_that_only_plain_models_read_are_refused(
    tmp_path: Path, options: dict[str, Any], func: Any, named: str
) -> None:
    args = make_arguments(tmp_path, **options)
    with pytest.raises(ConfigError, match=f"{named} was given together with Task"):
        check_unused_by_task(args, Task(), compute_loss_func=func)
    check_unused_by_task(args, ModelTask(Net()), compute_loss_func=func)
    check_unused_by_task(make_arguments(tmp_path), Task(), compute_loss_func=None)


# -- the metric that picks the best model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "eval_dataset", "hint"),
    [
        ("f1", [], "Did you mean 'eval_loss'"),
        ("los", [], "Did you mean 'eval_loss'"),
        ("loss", {"a": [], "b": []}, "Did you mean 'eval_._loss' or 'eval_._loss'"),
        ("eval_c_loss", {"a": []}, "'eval_a_loss'"),
    ],
)
def test_metric_that_no_evaluation_reports_is_refused(
    tmp_path: Path, metric: str, eval_dataset: Any, hint: str
) -> None:
    args = make_arguments(tmp_path, metric_for_best_model=metric)
    with pytest.raises(ConfigError, match=f"metric_for_best_model='{metric}' was asked for.*{hint}"):
        check_best_metric(args, task=ModelTask(Net()), compute_metrics=None, eval_dataset=eval_dataset)


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
