"""A task whose default `count_items` contradicts its loss is refused, in training and in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kinds import PerSample, Shifts, Sums, Words, full_rows, make_model, make_rows
from support.tiny import Task, make_arguments
from support.tiny import make_rows as samples
from torch import nn

from hftrain import StepOutput, TaskError, TaskModule, Trainer


class Tells(TaskModule):
    """Returns outputs and labels with the loss of its model."""

    def training_step(self, batch: Any) -> StepOutput:
        found = self.model(**batch)
        return StepOutput(loss=found["loss"], outputs=found["logits"], labels=batch["labels"])


class Declares(Tells):
    def count_items(self, batch: Any) -> int:
        return len(batch["labels"])


def run(folder: Path, task: TaskModule, method: str, rows: Any) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 4}
    arguments = make_arguments(folder, max_steps=1, **sizes)
    getattr(Trainer(task, arguments, train_dataset=rows, eval_dataset=rows), method)()


@pytest.mark.parametrize("method", ["train", "evaluate"])
@pytest.mark.parametrize(("kind", "items"), [(PerSample, "4 samples"), (Shifts, r"\d+ shifted labels")])
def test_loss_over_other_items_is_refused(tmp_path: Path, kind: type[Words], items: str, method: str) -> None:
    with pytest.raises(TaskError, match=rf"Its loss is the mean over {items} of this batch.*Override count_items"):
        run(tmp_path, Tells(make_model(kind)), method, make_rows())


@pytest.mark.parametrize("method", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("task", "kind", "rows"),
    [(Tells, Words, make_rows), (Declares, PerSample, make_rows), (Tells, PerSample, full_rows)],
)
def test_loss_over_the_items_is_accepted(tmp_path: Path, task: Any, kind: Any, rows: Any, method: str) -> None:
    run(tmp_path, task(make_model(kind)), method, rows())


def test_sum_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="The loss of Tells is a sum over a batch"):
        run(tmp_path, Tells(make_model(Sums)), "evaluate", make_rows())


@pytest.mark.parametrize("options", [{"weight": torch.tensor([1.0, 9.0, 0.5]).double()}, {"ignore_index": 0}])
def test_evaluation_weights_batches_by_the_count_of_the_task(tmp_path: Path, options: dict[str, Any]) -> None:
    class Weighted(Task):
        def training_step(self, batch: Any) -> Any:
            return nn.functional.cross_entropy(self.model.layers(batch["x"].double()), batch["labels"], **options)

        def count_items(self, batch: Any) -> torch.Tensor:
            return options.get("weight", torch.tensor([0.0, 1.0, 1.0]))[batch["labels"]].sum()

    task, sizes = Weighted().double(), [{"per_device_eval_batch_size": size} for size in (1, 4, 7)]
    evaluate = [Trainer(task, make_arguments(tmp_path, **size), eval_dataset=samples()).evaluate for size in sizes]
    assert [each()["eval_loss"] for each in evaluate] == pytest.approx([evaluate[0]()["eval_loss"]] * 3, abs=1e-6)


def test_loss_without_outputs_is_not_checked(tmp_path: Path) -> None:
    class Silent(TaskModule):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

    run(tmp_path, Silent(make_model(PerSample)), "train", make_rows())
