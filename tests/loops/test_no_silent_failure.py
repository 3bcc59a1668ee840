"""Ways in which a run could go wrong without a word, each closed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer, train
from torch import nn

from hftrain import (
    ConfigError,
    StepOutput,
    Trainer,
    TrainerCallback,
    set_seed,
)


@pytest.mark.parametrize("greater", [True, False])
def test_nan_is_never_the_best_metric(tmp_path: Path, greater: bool) -> None:
    values = iter([math.nan, 0.5, 0.4, 0.6])
    trainer = train(
        tmp_path, train_dataset=make_rows(8), eval_dataset=make_rows(4),
        compute_metrics=lambda prediction: {"score": next(values)}, num_train_epochs=4, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=greater,
    )  # fmt: skip
    assert trainer.state.best_metric == (0.6 if greater else 0.4)


def test_a_restored_control_does_not_stop_the_resumed_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100, "num_train_epochs": 3}
    train(tmp_path, train_dataset=make_rows(22), callbacks=[StopAt(5)], **options)
    arguments = make_arguments(tmp_path, restore_callback_states_from_checkpoint=True, **options)
    resumed = Trainer(Net(), arguments, train_dataset=make_rows(22))
    assert resumed.train(resume_from_checkpoint=True).global_step == 18


def test_a_used_schedule_of_the_users_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3)
    trainer = train(tmp_path, model, optimizers=(optimizer, schedule), max_steps=3)
    assert "stepped before" not in caplog.text
    trainer.train()
    assert "stepped before" in caplog.text


class Targets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.layer(x)
        return (
            (nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)
            if targets is not None
            else (logits,)
        )


def make_targets() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(12):
        targets = torch.randint(0, 3, (5,), generator=generator)
        targets[1 + index % 5 :] = -100
        rows.append({"x": torch.randn(5, 4, generator=generator), "targets": targets})
    return rows


def test_labels_of_another_name_weigh_smooth_and_count_alike(tmp_path: Path) -> None:
    set_seed(0)
    model, rows = Targets(), make_targets()
    losses, norms = [], []
    for size, accumulation in ((12, 1), (4, 3), (1, 12)):
        trainer = train(
            tmp_path, model, train_dataset=rows, eval_dataset=rows, per_device_train_batch_size=size,
            per_device_eval_batch_size=size, max_steps=1, gradient_accumulation_steps=accumulation, learning_rate=0.0,
            label_names=["targets"],
        )  # fmt: skip
        norms.append(trainer.state.log_history[0]["grad_norm"])
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    smoothed = Trainer(model, make_arguments(tmp_path, label_names=["targets"], label_smoothing_factor=0.3))
    assert smoothed.evaluate(rows)["eval_loss"] != pytest.approx(losses[0], rel=1e-3)


def test_best_checkpoint_is_found_where_the_run_was_moved_to(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 2,
        "metric_for_best_model": "score", "greater_is_better": False, "num_train_epochs": 2,
    }  # fmt: skip

    def make(folder: str, **more: Any) -> Trainer:
        return make_trainer(
            tmp_path / folder, train_dataset=make_rows(8), eval_dataset=make_rows(4),
            compute_metrics=lambda prediction: {"score": float(trainer.state.global_step)}, **{**options, **more},
        )  # fmt: skip

    trainer = make("old")
    trainer.train()
    (tmp_path / "old").rename(tmp_path / "new")
    trainer = make("new", num_train_epochs=5)
    trainer.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "checkpoint-10",
        "checkpoint-2",
        "journal.jsonl",
    ]


def test_masked_micro_batch_has_no_share_wherever_it_stands(tmp_path: Path) -> None:
    class Words(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 3)

        def training_step(self, batch: Any) -> StepOutput:
            logits = self.model(batch["x"]).flatten(0, 1)
            return StepOutput(loss=nn.functional.cross_entropy(logits, batch["labels"].flatten()))

    losses = []
    for position in range(3):
        rows = [{"x": row["x"], "labels": row["targets"]} for row in make_targets()[:3]]
        order = torch.randperm(3, generator=torch.Generator().manual_seed(42)).tolist()
        rows[order[position]] = {"x": torch.ones(5, 4), "labels": torch.full((5,), -100)}
        set_seed(0)
        task = Words()
        valid = [row for row in rows if (row["labels"] != -100).any()]
        expected = task.training_step(
            {"x": torch.stack([r["x"] for r in valid]), "labels": torch.stack([r["labels"] for r in valid])}
        ).loss
        trainer = train(
            tmp_path, task, train_dataset=rows, per_device_train_batch_size=1, gradient_accumulation_steps=3,
            num_train_epochs=1,
        )  # fmt: skip
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-6)
        losses.append(trainer.state.log_history[0])
    assert all("nonfinite_losses" not in entry for entry in losses)


def test_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = train(tmp_path, max_steps=1)
    trainer.model = Net()
    with pytest.raises(ConfigError, match="after replacing the model"):
        trainer.train()


def test_relative_folder_stays_when_the_working_directory_changes(
    tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Move(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (tmp_cwd / "elsewhere").mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_cwd / "elsewhere")

    train(Path("out"), train_dataset=make_rows(8), callbacks=[Move], save_strategy="epoch")
    assert len(list((tmp_cwd / "out").iterdir())) == 3, "two checkpoints and the journal"
    assert not list((tmp_cwd / "elsewhere").iterdir())


def test_train_within_train_is_refused(tmp_path: Path) -> None:
    class Again(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with pytest.raises(ConfigError, match="one training at a time"):
                trainer.train()

    trainer = make_trainer(tmp_path, callbacks=[Again], max_steps=2)
    assert trainer.train().global_step == 2


def test_tensors_of_a_task_itself_are_placed(tmp_path: Path) -> None:
    class Weighted(Task):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(3))

    task = Weighted()
    trainer = make_trainer(tmp_path, task, max_steps=1, save_strategy="steps")
    moved = []
    task._apply = lambda function, recurse=True: moved.append(function) or task  # type: ignore[method-assign]
    trainer.train()
    assert moved
    assert (tmp_path / "checkpoint-1" / "task_state.safetensors").exists()


def test_evaluation_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), eval_dataset={"valid": make_rows(4)})
    with pytest.raises(ConfigError, match="Did you mean 'valid'"):
        trainer.evaluate("vali")


def test_resume_from_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot resume from"):
        Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows()).train(resume_from_checkpoint=1)  # type: ignore[arg-type]
