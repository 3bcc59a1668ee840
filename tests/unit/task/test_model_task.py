"""A plain model as a task, by the documented rules."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import Net, make_rows
from torch import nn
from torch.nn.functional import cross_entropy

from hftrain import TaskError
from hftrain.core.types import StepOutput
from hftrain.task.model_task import ModelTask


def make_batch(num: int = 4) -> dict[str, torch.Tensor]:
    rows = make_rows(num)
    return {key: torch.stack([row[key] for row in rows]) for key in ("x", "labels")}


class Answer(nn.Module):
    """Return logits in one of the documented forms: with the loss where labels are given."""

    def __init__(self, form: str = "dict", **config: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.form = form
        self.config = SimpleNamespace(**config)
        self.calls: list[set[str]] = []

    def forward(self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        given = {"labels": labels, "num_items_in_batch": num_items_in_batch}
        self.calls.append({name for name, value in given.items() if value is not None})
        logits = self.linear(x)
        loss = None if labels is None else cross_entropy(logits, labels)
        if self.form == "dict":
            return {**({} if loss is None else {"loss": loss}), "logits": logits, "hidden": x}
        if self.form == "tuple":
            return (logits, x) if loss is None else (loss, logits, x)
        return logits


class Blind(nn.Module):
    """Give a loss without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        return {"loss": logits.square().mean(), "logits": logits}


def predict(task: ModelTask, batch: Any, *, loss_only: bool = False, ignore: tuple[str, ...] = ()) -> StepOutput:
    return task.predict_batch(
        lambda inputs: task.compute_loss(task.model, inputs), batch, loss_only=loss_only, ignore=ignore
    )


# -- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "given", "names"),
    [
        (Net(), None, ["labels"]),
        (Blind(), None, ["labels"]),
        (Net(), ["x", "y"], ["x", "y"]),
        (Net(), [], []),
    ],
)
def test_label_names_are_found_or_given(model: nn.Module, given: Any, names: list[str]) -> None:
    assert ModelTask(model, label_names=given).label_names == names


# -- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [(torch.ones(2, 4), torch.tensor([0, 1])), [torch.ones(2, 4), torch.tensor([0, 1])]])
def test_sequences_become_positional_arguments(inputs: Any) -> None:
    model = Net()
    assert ModelTask(model).compute_loss(model, inputs)[0].dim() == 0


def test_single_tensor_becomes_the_first_argument() -> None:
    model = Blind()
    assert ModelTask(model).compute_loss(model, torch.ones(2, 4))[0].dim() == 0


@pytest.mark.parametrize("form", ["dict", "tuple", "tensor"])
def test_label_smoothing_replaces_the_models_loss(form: str) -> None:
    batch, model = make_batch(), Answer(form)
    loss, _ = ModelTask(model, label_smoothing=0.2).compute_loss(model, batch)
    expected = cross_entropy(model.linear(batch["x"]), batch["labels"], label_smoothing=0.2)
    torch.testing.assert_close(loss, expected)
    assert model.calls == [set()]


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_label_smoothing_leaves_labels_to_encoder_decoders(form: str) -> None:
    batch, model = make_batch(), Answer(form, is_encoder_decoder=True)
    loss, _ = ModelTask(model, label_smoothing=0.2).compute_loss(model, batch)
    expected = cross_entropy(model.linear(batch["x"]), batch["labels"], label_smoothing=0.2)
    torch.testing.assert_close(loss, expected)
    assert model.calls == [{"labels"}]


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_own_loss_function_gets_outputs_labels_and_count(is_encoder_decoder: bool) -> None:
    seen: dict[str, Any] = {}

    def own(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.update(outputs=outputs, labels=labels, num_items=num_items_in_batch)
        return outputs["logits"].sum()

    batch, model = make_batch(), Answer(is_encoder_decoder=is_encoder_decoder)
    loss, outputs = ModelTask(model, compute_loss_func=own).compute_loss(model, batch, 7)
    assert loss == outputs["logits"].sum()
    assert seen["outputs"] is outputs
    assert seen["labels"] is batch["labels"]
    assert seen["num_items"] == 7
    assert model.calls == [{"labels"} if is_encoder_decoder else set()]


# -- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [(torch.tensor([0, 1]),), ()])
def test_plain_tuples_give_a_loss_if_they_hold_labels(labels: Any) -> None:
    output = predict(ModelTask(Answer("tuple")), (torch.ones(2, 4), *labels))
    assert (output.loss is not None) == bool(labels)
    assert [each.shape for each in output.outputs] == [(2, 3), (2, 4)]
    assert output.labels is None


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"compute_loss_func": lambda outputs, labels, num_items_in_batch: labels.sum()}],
)
def test_first_of_a_tuple_is_a_prediction_where_the_loss_came_from_elsewhere(options: dict[str, Any]) -> None:
    batch, model = make_batch(), Answer("tuple")
    logits, hidden = predict(ModelTask(model, **options), batch).outputs
    assert torch.equal(logits, model.linear(batch["x"]))
    assert torch.equal(hidden, batch["x"])


# -- items -----------------------------------------------------------------------------------------------------------

tokens = torch.tensor([[5, 6, -100], [-100, 7, 8]])
shifted = torch.tensor([[6, -100, -100], [7, 8, 9]])


@pytest.mark.parametrize(
    ("kind", "batch", "count"),
    [
        ("labels", {"labels": tokens}, 4),
        ("shifted_labels", {"labels": tokens}, 3),
        ("shifted_labels", {"labels": tokens, "shift_labels": shifted}, 4),
        ("labels", {"labels": tokens, "shift_labels": shifted}, 4),
        ("shifted_labels", UserDict(labels=tokens), 3),
        ("labels", {"labels": torch.full((2, 3), -100)}, 0),
        ("labels", {"x": torch.zeros(3, 4), "labels": torch.zeros(3)}, 3),
        ("labels", {"x": torch.zeros(3, 4), "labels": (torch.zeros(3), torch.zeros(3))}, 3),
        ("labels", {"x": torch.zeros(3, 4)}, 3),
        ("labels", (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)), 5),
        ("labels", torch.zeros(2, 4), 2),
        ("samples", {"labels": tokens}, 2),
        ("sum", {"labels": tokens}, 1),
    ],
)
def test_items_are_counted_as_declared(kind: str, batch: Any, count: int) -> None:
    assert int(ModelTask(Answer(), count_items=kind).count_items(batch)) == count


@pytest.mark.parametrize(
    ("batch", "shifts", "count"),
    [
        ({"labels": tokens}, False, 4),
        ({"labels": tokens}, True, 3),
        ({"labels": tokens, "shift_labels": shifted}, True, 4),
        ({"labels": torch.zeros(3)}, False, 3),  # a number for each sample
        ({"labels": (torch.zeros(3), torch.zeros(3))}, False, None),
        ({"target_labels": tokens}, False, None),
        (torch.zeros(2, 4), False, None),
    ],
)
def test_documented_count_is_that_of_transformers(batch: Any, shifts: bool, count: int | None) -> None:
    found = ModelTask(Answer()).documented_count(batch, shifts=shifts)
    assert (None if found is None else int(found)) == count


# -- labels under another name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs", [{"x": torch.ones(2, 4)}, (torch.ones(2, 4),), {"x": torch.ones(2, 4), "a": 1, "b": 2}]
)
def test_label_smoothing_needs_one_column_of_labels(inputs: Any) -> None:
    names = ["a", "b"] if "a" in inputs else None
    task = ModelTask(Net(), label_smoothing=0.1, label_names=names)
    with pytest.raises(TaskError, match=r"label_smoothing_factor=0\.1.* no labels to smooth"):
        task.compute_loss(task.model, inputs)


@pytest.mark.parametrize(
    ("names", "batch", "key"),
    [
        (["labels"], {"labels": 1}, "labels"),
        (["y"], {"y": 1}, "y"),
        (["y"], {"y": 1, "labels": 2}, "labels"),
        (["y"], {"y": None}, None),
        (["y", "z"], {"y": 1, "z": 2}, None),
        ([], {"labels": 1}, "labels"),
        (["y"], (1, 2), None),
    ],
)
def test_key_of_the_labels(names: list[str], batch: Any, key: str | None) -> None:
    assert ModelTask(Net(), label_names=names).label_key(batch) == key


def test_samples_are_counted_by_labels_then_main_input_then_what_most_agree_on() -> None:
    task = ModelTask(Net(), label_names=["target"])
    task_of_images = ModelTask(Answer())
    task_of_images.model.main_input_name = "pixels"
    task_of_images = ModelTask(task_of_images.model)
    others = {"edges": torch.zeros(2, 7), "x": torch.zeros(7, 4), "node": torch.zeros(7)}
    assert task.count_as("samples", {**others, "target": torch.zeros(4)}) == 4
    assert task_of_images.count_as("samples", {**others, "pixels": torch.zeros(5, 3)}) == 5
    assert task.count_as("samples", others) == 7
