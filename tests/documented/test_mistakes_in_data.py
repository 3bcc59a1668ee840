"""Usual mistakes in the user's datasets, collators, metrics, callbacks, loops and loggers, and what each is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mistakes import Mistake, check, table
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer, train
from torch.utils.data import Dataset, IterableDataset, Subset

from hftrain import EarlyStoppingCallback, ExportableState, FitLoop, Logger, TaskError, Trainer, TrainerCallback

tm: Any = pytest.importorskip("torchmetrics")
X, LABEL = torch.zeros(4), torch.tensor(0)


class Own(Dataset[Any]):
    """A dataset of the user's own, each of whose samples a function makes."""

    def __init__(self, sample: Callable[[int], Any], num: int = 8) -> None:
        self.sample, self.num = sample, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class NoIterator(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return make_rows(8)  # type: ignore[return-value]


class EndsEarly(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield make_rows(1)[0]
        fail()


class Picture:
    """Stands for an image of Pillow's."""


def reading(name: str, data: Any, says: str, error: Any = TaskError, **options: Any) -> Mistake:
    """Make the mistake of training on a dataset."""
    return Mistake(name, lambda folder: train(folder, train_dataset=data, max_steps=1, **options), says, error)


def sampling(name: str, sample: Callable[[int], Any], says: str) -> Mistake:
    """Make the mistake of training on these samples."""
    return reading(name, Own(sample), says)


def collating(name: str, collator: Any, says: str, model: Any = Net) -> Mistake:
    """Make the mistake of training with a collator."""
    return Mistake(name, lambda folder: train(folder, model(), data_collator=collator, max_steps=1), says, TypeError)


def stacked(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "labels")}


class NeedsInstance:
    def __call__(self, samples: list[Any]) -> Any:
        return stacked(samples)


def measuring(name: str, compute_metrics: Any, says: str) -> Mistake:
    """Make the mistake of evaluating with a `compute_metrics`."""

    def make(folder: Path) -> None:
        make_trainer(folder, eval_dataset=make_rows(8), compute_metrics=compute_metrics, eval_strategy="epoch").train()

    return Mistake(name, make, says, TaskError)


def tracking(name: str, says: str, error: Any = TaskError, metric: Any = None, **methods: Any) -> Mistake:
    """Make the mistake of evaluating a task with these methods, and with a metric as `acc`."""

    def build() -> Any:
        task = type("Mine", (Task,), methods)()
        if metric is not None:
            task.acc = metric()
        return task

    make = lambda folder: make_trainer(folder, build(), eval_dataset=make_rows(8)).evaluate()  # noqa: E731
    return Mistake(name, make, says, error)


def accuracy() -> Any:
    return tm.Accuracy("multiclass", num_classes=3)


def update_of(find: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def evaluation_step(own: Any, batch: Any) -> Any:
        find(own).update(own.model.layers(batch["x"]), batch["labels"])
        return Task.training_step(own, batch)

    return evaluation_step


def calling(name: str, says: str, error: Any = TaskError, bases: Any = (TrainerCallback,), **methods: Any) -> Mistake:
    """Make the mistake of training with a callback of these methods."""

    def make(folder: Path) -> None:
        callback = type("Mine", bases, methods)()
        arguments = make_arguments(folder, max_steps=1, save_strategy="steps", save_steps=1)
        Trainer(Net(), arguments, train_dataset=make_rows(8), callbacks=[callback]).train()

    return Mistake(name, make, says, error)


EXPORTED = (TrainerCallback, ExportableState)

DATA = [
    sampling("None", lambda i: None, "Give every sample"),
    sampling("some None", lambda i: None if i % 2 else {"x": X, "labels": LABEL}, "2 of 4 are None"),
    sampling("lengths of tuples", lambda i: (X,) * (1 + i % 2), "the shapes differ"),
    sampling("ragged", lambda i: {"x": torch.zeros(4 + i), "labels": 0}, "pads"),
    sampling("ragged lists", lambda i: {"x": [1] * (4 + i)}, "tokenizer"),
    sampling("key of some", lambda i: {"x": X} | ({"labels": 0} if i == 6 else {}), "3 of 4 are None or missing"),
    sampling("picture", lambda i: {"x": Picture()}, "Convert it to a tensor in the dataset"),
    sampling("picture in a tuple", lambda i: (Picture(), 0), "Convert it to a tensor"),
    sampling("labels as text", lambda i: {"x": X, "labels": "cat"}, "Number the classes"),
    sampling("label as text", lambda i: {"x": X, "label": "cat"}, "Number the classes"),
    reading("columns of tensors", (torch.zeros(8, 4), torch.zeros(8)), "TensorDataset", error=ValueError),
    reading("texts", ["a"] * 8, "let the dataset return dicts", error=TypeError),
    reading("set", {1, 2}, "no order", error=ValueError),
    reading("class", Own, "Pass an instance: Own(...)", error=ValueError),
    reading("function", lambda: None, "Pass what it returns", error=ValueError),
    reading("no length", type("Rows", (), {"__getitem__": lambda self, index: X})(), "__len__", error=ValueError),
    reading("generator", (row for row in make_rows(8)), "Pass a list", error=ValueError),
    reading("columns", {"x": [1], "labels": [0]}, "Dataset.from_dict", error=ValueError),
    collating("list", lambda samples: samples, "join them"),
    collating("list for a task", lambda samples: samples, "join them", model=Task),
    collating("None for a task", lambda samples: None, "The data_collator returned None", model=Task),
    Mistake(
        "eval_collator None",
        lambda folder: make_trainer(folder, eval_collator=lambda samples: None).evaluate(make_rows(8)),
        "The eval_collator returned None",
        TypeError,
    ),
    collating("collator None", lambda samples: None, "Let it return the batch"),
    collating("no labels", lambda samples: {"x": stacked(samples)["x"]}, "label_names"),
    collating("two arguments", lambda samples, more: samples, "data_collator(samples)"),
    collating("collator class", NeedsInstance, "Pass an instance: NeedsInstance()"),
]

METRICS = [
    measuring("keys", lambda prediction: {1: 2.0}, "a dict of numbers by name"),
    measuring("arguments", lambda predictions, labels: {}, "prediction has predictions and"),
    measuring("no argument", lambda: {}, "compute_metrics(prediction)"),
    tracking("list of metrics", "a dict", metrics=lambda s, stage: [accuracy()]),
    tracking("metrics as numbers", "StepOutput(logs=...)", metrics=lambda s, stage: {"a": 0.5}),
    tracking("metrics without stage", "metrics(self, stage)", metrics=lambda s: {}),
]

CALLBACKS = [
    calling("no arguments", "(self, args, state, control, **kwargs)", on_step_end=lambda s: None),
    calling("pl_module", "(self, args, state", on_train_end=lambda s, trainer, pl_module: 0),
    calling("no keywords", "**kwargs", on_log=lambda s, args, state, control: None),
    calling("returns True", "'should_training_stop'", on_step_end=lambda *a, **k: True),
    calling("flag", "'should_training_stop'", on_log=lambda *a, **k: {"stop": True}),
    calling(
        "control",
        "'should_training_stop'",
        error=UserWarning,
        on_step_end=lambda s, args, state, control, **k: setattr(control, "should_stop_training", True),
    ),
    calling(
        "Lightning's flag",
        "Did you mean 'should_training_stop'",
        error=UserWarning,
        on_step_end=lambda s, args, state, control, **k: setattr(control, "should_stop", True),
    ),
    calling("state None", "'args': {...}", error=ValueError, bases=EXPORTED, state=lambda s: None),
    calling("no state", "'attributes'", error=ValueError, bases=EXPORTED),
    calling(
        "function in a state",
        "Let state() return",
        error=ValueError,
        bases=EXPORTED,
        state=lambda s: {"args": {}, "attributes": {"f": print}},
    ),
    Mistake("text", lambda folder: train(folder, None, "early"), "TrainerCallback", TaskError),
    Mistake("nested", lambda folder: train(folder, None, [EarlyStoppingCallback()]), "flat list", TaskError),
]

PARTS = [
    Mistake(
        "run() of a loop without the arguments it is called with",
        lambda folder: make_trainer(folder, loop=type("Mine", (FitLoop,), {"run": lambda self: None})()),
        "Define run(self, *, has_left=False, ends_epoch=False)",
        TaskError,
    ),
    Mistake("dict", lambda f: make_trainer(f, loop={"fit": FitLoop()}), "a list", TaskError),
    Mistake(
        "function in a loop",
        lambda folder: train(
            folder,
            loop=type("Mine", (FitLoop,), {"state_dict": lambda s: {"f": print}})(),
            save_strategy="steps",
            save_steps=1,
        ),
        "state['f']",
        ValueError,
    ),
    Mistake("logger", lambda f: make_trainer(f, loggers=Picture()), "hftrain.Logger"),
    Mistake("logger class", lambda f: make_trainer(f, loggers=Logger), "instances"),
    Mistake(
        "logger without log",
        lambda folder: Trainer(Net(), make_arguments(folder), loggers=type("Mine", (Logger,), {"name": "mine"})()),
        "log(self, metrics, step)",
        UserWarning,
    ),
]


@table([*DATA, *METRICS, *CALLBACKS, *PARTS])
def test_mistake_is_told_in_words_that_help(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(mistake, tmp_path, monkeypatch)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("of the user's own")


@pytest.mark.parametrize(
    ("options", "error", "note"),
    [
        ({"train_dataset": Own(fail)}, LookupError, "Raised while reading sample 6 of Own."),
        (
            {"train_dataset": Own(make_rows(8).__getitem__, 9)},
            IndexError,
            "Raised while reading sample 8 of Own. Its __len__ is 9.",
        ),
        (
            {"train_dataset": Own(fail), "dataloader_num_workers": 1},
            LookupError,
            "Raised in loader worker 0 in the dataset. Set dataloader_num_workers=0 to debug it in this process",
        ),
        (
            {"data_collator": fail},
            LookupError,
            "Raised in the data_collator fail, for samples 6, 3, 0, 7. The first: x float32 (4,), labels int64 ().",
        ),
        (
            {"data_collator": fail, "dataloader_num_workers": 1},
            LookupError,
            "Raised in loader worker 0 in the data_collator. Set dataloader_num_workers=0 to debug it",
        ),
        ({"train_dataset": NoIterator(), "max_steps": 1}, TypeError, "Raised while reading NoIterator."),
        ({"train_dataset": Subset(Own(fail), range(8))}, LookupError, "Raised while reading sample 6 of Subset."),
        ({"train_dataset": EndsEarly(), "max_steps": 1}, LookupError, "Raised while reading EndsEarly."),
        (
            {"compute_metrics": fail, "eval_strategy": "epoch"},
            LookupError,
            "Raised in compute_metrics(prediction), with the arrays prediction.predictions float32 (8, 3) and "
            "prediction.label_ids int64 (8,).",
        ),
        (
            {"callbacks": [type("Mine", (TrainerCallback,), {"on_log": fail})()]},
            LookupError,
            "Raised in on_log of the ",
        ),
        (
            {
                "callbacks": [
                    type("Mine", (TrainerCallback,), {"on_log": lambda *args, logs, **kwargs: logs["accuracy"]})()
                ]
            },
            KeyError,
            "There is no such key in logs: loss, grad_norm",
        ),
    ],
)
def test_error_of_the_users_code_ends_with_a_note_of_where(
    tmp_path: Path, options: dict[str, Any], error: Any, note: str
) -> None:
    rows = make_rows(8)
    with pytest.raises(error) as caught:
        make_trainer(tmp_path, **{"train_dataset": rows, "eval_dataset": rows, **options}).train()
    assert not isinstance(caught.value, TaskError)
    (found,) = caught.value.__notes__
    assert note in found
    if "callbacks" in options:
        assert found.startswith("Raised in on_log of the callback Mine.")


def test_callback_whose_base_was_not_made_is_named(tmp_path: Path) -> None:
    class Mine(EarlyStoppingCallback):
        def __init__(self) -> None:
            """Forget the base class."""

    best = {"metric_for_best_model": "loss", "greater_is_better": False}
    trainer = make_trainer(tmp_path, None, Mine(), eval_dataset=make_rows(4), eval_strategy="epoch", **best)
    with pytest.raises(AttributeError) as caught:
        trainer.train()
    assert caught.value.__notes__ == ["Raised in on_evaluate of the callback Mine."]


def test_the_sample_that_is_unlike_the_others_of_its_batch_is_named(tmp_path: Path) -> None:
    rows = make_rows(8)
    rows[3]["x"] = torch.zeros(5)
    with pytest.raises(TaskError, match="the shapes differ") as caught:
        train(tmp_path, train_dataset=rows, train_sampling_strategy="sequential")
    assert "for sample 3. It is x float32 (5,), labels int64 ()." in caught.value.__notes__[0]


def test_name_of_the_best_metric_that_no_metric_has_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task: Any = type("Mine", (Task,), {"evaluation_step": update_of(lambda own: own.acc)})()
    task.acc = accuracy()
    best = {"metric_for_best_model": "accuracy", "greater_is_better": True, "eval_strategy": "epoch"}
    with pytest.raises(ValueError, match="The evaluation did not report"):
        make_trainer(tmp_path, task, eval_dataset=make_rows(4), **best).train()
    assert "asks for 'eval_accuracy', and the metrics of Mine are eval_acc, eval_loss" in caplog.text
