"""What a task knows of its run, and what a run tells of its task."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Task, make_arguments, make_rows
from torch import nn
from torchmetrics import MeanMetric

from hftrain import FitLoop, TaskError, TaskModule, Trainer, TrainerCallback
from hftrain.core.errors import HFTrainError


class Knowing(Task):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, float]] = []
        self.mean = MeanMetric()

    def training_step(self, batch: Any) -> Any:
        self.seen.append(("train", self.step, self.epoch))
        return super().training_step(batch)

    def evaluation_step(self, batch: Any) -> Any:
        self.seen.append(("eval", self.step, self.epoch))
        self.mean.update(batch["x"])
        return super().training_step(batch)


class OwnLoop(FitLoop):
    pass


@pytest.mark.parametrize("loop", [None, OwnLoop])
def test_task_knows_step_and_epoch(tmp_path: Path, loop: Any) -> None:
    task, rows = Knowing(), make_rows(8)
    assert (task.step, task.epoch, type(task.epoch)) == (0, 0.0, float)
    settings = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    arguments = make_arguments(tmp_path, **settings)
    trainer = Trainer(task, arguments, train_dataset=rows, eval_dataset=rows[:2], loop=loop)
    trainer.evaluate()
    trainer.train()
    per_step = trainer.state.epoch / 3
    trained = [("train", step, pytest.approx(step * per_step)) for step in range(3)]
    assert task.seen == [("eval", 0, 0.0), *trained, ("eval", 3, trainer.state.epoch)]
    assert [each["epoch"] for each in trainer.state.log_history if "loss" in each][-1] == task.epoch
    del task.seen[:]
    Trainer(task, arguments, train_dataset=rows, eval_dataset=rows).train(resume_from_checkpoint=True)
    assert (task.step, task.seen) == (3, [])


@pytest.mark.parametrize(("name", "own"), [("step", 7), ("epoch", MeanMetric())])
def test_what_a_task_has_under_these_names_is_no_count(tmp_path: Path, name: str, own: Any) -> None:
    task = Task()
    setattr(task, name, own)
    trainer = Trainer(task, make_arguments(tmp_path), train_dataset=make_rows(4), eval_dataset=make_rows(4))
    for act in (trainer.train, trainer.evaluate):
        with pytest.raises(TaskError, match=f"Cannot use the attribute '{name}' of Task"):
            act()


def test_callbacks_read_the_metrics_of_an_evaluation(tmp_path: Path) -> None:
    found = []

    class Reader(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            found.append((float(task.mean.compute()), metrics["eval_mean"]))

    task, rows = Knowing(), make_rows(4)
    trainer = Trainer(task, make_arguments(tmp_path), eval_dataset=rows, callbacks=[Reader])
    for _ in range(2):
        trainer.evaluate()
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] == pytest.approx(torch.stack([row["x"] for row in rows]).mean().item())
    assert not task.mean.update_called


def test_missing_step_is_a_short_traceback(tmp_path: Path) -> None:
    for name in ("train", "evaluate", "predict"):
        given = {"train_dataset": make_rows(4), "eval_dataset": make_rows(4)}
        trainer = Trainer(TaskModule(nn.Linear(4, 3)), make_arguments(tmp_path), **given)
        with pytest.raises(HFTrainError, match=r"training_step\(batch\)") as caught:
            getattr(trainer, name)(*[make_rows(4)] * (name == "predict"))
        assert len(traceback.format_exception(caught.value)) + len(caught.traceback) < 20


@pytest.mark.parametrize("names", [("a", "b"), (None, None)])
def test_rate_of_each_group_is_logged_if_they_differ(tmp_path: Path, names: tuple[Any, Any]) -> None:
    class Rates(Task):
        def configure_optimizers(self) -> Any:
            one, *others = self.model.parameters()
            groups = [{"params": [one], "lr": 0.5}, {"params": others, "lr": 0.25}]
            groups = [{**group, "name": name} if name else group for group, name in zip(groups, names, strict=True)]
            optimizer = torch.optim.SGD(groups)
            return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    trainer = Trainer(Rates(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows(8))
    trainer.train()
    first, second = (names[0] or "0", names[1] or "1")
    found = [
        [each["learning_rate"], each[f"learning_rate/{first}"], each[f"learning_rate/{second}"]]
        for each in trainer.state.log_history
        if "loss" in each
    ]
    assert found == [[0.5, 0.5, 0.25], [0.25, 0.25, 0.125]]
    trainer = Trainer(Task(), make_arguments(tmp_path, max_steps=1), train_dataset=make_rows(8))
    trainer.train()
    assert not any(name.startswith("learning_rate/") for each in trainer.state.log_history for name in each)


def test_groups_of_own_optimizers_are_read_and_written(tmp_path: Path) -> None:
    class ByHand(Task):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            one, *others = self.model.parameters()
            return {"G": torch.optim.SGD([one], 0.5), "D": torch.optim.SGD(others, 0.25)}

        def training_step(self, batch: Any) -> Any:
            for name in ("G", "D"):
                self.optimizers[name].minimize(super().training_step(batch).loss)
                self.optimizers[name].param_groups[0]["lr"] /= 2
            return super().training_step(batch)

    arguments = make_arguments(tmp_path, max_steps=2, lr_scheduler_type="constant")
    trainer = Trainer(ByHand(), arguments, train_dataset=make_rows(8))
    trainer.train()
    logs = [each for each in trainer.state.log_history if "loss" in each]
    assert [(each["learning_rate/G"], each["learning_rate/D"]) for each in logs] == [(0.25, 0.125)] * 2


def test_evaluations_and_predictions_have_their_own_collator(tmp_path: Path) -> None:
    def collate(samples: Any) -> Any:
        calls.append(len(samples))
        return {name: torch.stack([torch.as_tensor(each[name]) for each in samples]) for name in samples[0]}

    calls: list[int] = []
    rows = make_rows(4)
    arguments = make_arguments(tmp_path, max_steps=1)
    given = {"train_dataset": rows, "eval_dataset": rows, "sanity_eval_batches": 1}
    trainer = Trainer(Task(), arguments, **given, eval_collator=collate)
    trainer.train()
    assert sum(calls) == min(4, arguments.eval_batch_size), "the sanity evaluation alone"
    trainer.evaluate()
    trainer.predict(rows)
    assert sum(calls) == min(4, arguments.eval_batch_size) + 8
    with pytest.raises(HFTrainError, match="eval_collator"):
        Trainer(Task(), arguments, eval_collator=3)
    loader = torch.utils.data.DataLoader(rows)
    with pytest.raises(HFTrainError, match="eval_collator=loader"):
        Trainer(Task(), arguments, eval_dataset=loader)
