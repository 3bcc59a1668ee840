"""Usual mistakes in a step, a model or its data: the error says what to do, and comes from where the mistake is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows
from torch import nn

from hftrain import TaskError, TaskModule, Trainer, TrainerCallback


def train(model: nn.Module, folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> None:
    kind(model, make_arguments(folder, max_steps=1), train_dataset=make_rows(8), **options).train()


class AsksTrainer(Task):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch).loss * self.current_epoch


class OnCuda(Task):
    def training_step(self, batch: Any) -> Any:
        return self.model(batch["x"].to("cuda"), batch["labels"])


class LogitsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class VectorNet(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return (nn.functional.cross_entropy(self.layers(x), labels, reduction="none"),)  # type: ignore[arg-type]


def test_attribute_of_lightnings_is_told_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"AsksTrainer\.current_epoch: .*state\.epoch") as caught:
        train(AsksTrainer(), tmp_path)
    assert caught.value.__cause__ is not None


def test_forward_that_takes_no_labels_is_told_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="argument 'labels'") as caught:
        train(LogitsOnly(), tmp_path)
    assert "LogitsOnly.forward takes x. " in caught.value.__notes__[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and no mistake")
def test_cuda_in_a_step_without_a_gpu_is_told(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        train(OnCuda(), tmp_path)
    assert "remove .cuda()" in caught.value.__notes__[0]


def test_a_callback_that_cannot_be_called_is_refused_at_once(tmp_path: Path) -> None:
    class Lonely(TrainerCallback):
        def on_log(self, args: Any, state: Any) -> None:  # type: ignore[override]
            """Do nothing."""

    with pytest.raises(
        TaskError, match=r"Lonely\.on_log\(args: .*Define on_log\(self, args, state, control, \*\*kwargs"
    ):
        Trainer(Task(), make_arguments(tmp_path), callbacks=[Lonely()])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_vector_loss_of_a_plain_model_is_refused(tmp_path: Path, accumulation: int) -> None:
    arguments = make_arguments(tmp_path, max_steps=1, gradient_accumulation_steps=accumulation)
    with pytest.raises(TaskError, match=r"VectorNet.*no scalar loss"):
        Trainer(VectorNet(), arguments, train_dataset=make_rows(8)).train()


def test_override_that_detaches_is_named(tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs).detach()

    with pytest.raises(TaskError, match=r"Mine\.compute_loss returned: it does not depend on any trainable"):
        train(Net(), tmp_path, Mine)


class Wrong(Task):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any) -> Any:
        if self.how == "size":
            batch["x"] = batch["x"].view(3, 5)
        if self.how == "own dict":
            return {}["x"]
        return super().training_step(batch)


@pytest.mark.parametrize(("how", "error"), [("size", RuntimeError), ("own dict", KeyError)])
@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_error_of_the_model_itself_comes_with_its_batch(tmp_path: Path, how: str, error: Any, verb: str) -> None:
    rows = make_rows(8)
    trainer = Trainer(Wrong(how), make_arguments(tmp_path, max_steps=1), train_dataset=rows, eval_dataset=rows)
    with pytest.raises(error) as caught:
        getattr(trainer, verb)()
    assert not isinstance(caught.value, TaskError)
    note = "\n".join(caught.value.__notes__)
    assert note == "The batch: x float32 (4, 4), labels int64 (4,)."


class Two(TaskModule):
    """Reads pairs."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.model(x).mean() + y.undefined


def test_attribute_error_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    rows: Any = [(torch.zeros(4), 1)] * 4
    trainer = Trainer(Two(nn.Linear(4, 1)), make_arguments(tmp_path, max_steps=1), train_dataset=rows)
    with pytest.raises(AttributeError, match="undefined") as caught:
        trainer.train()
    assert caught.value.__notes__ == ["The batch: list of (float32 (4, 4), int64 (4,))."]
