"""When a run logs, evaluates and saves, and what each log line holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows, train

from hftrain import Trainer, TrainerCallback


def run(folder: Path, **options: Any) -> Trainer:
    """Train for 2 epochs of 6 steps."""
    rows = {"train_dataset": make_rows(22), "eval_dataset": make_rows(4)}
    return train(folder, **{"logging_steps": 500, **rows, **options})  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"logging_steps": 5}, [5, 10]),
        ({"logging_steps": 5, "logging_first_step": True}, [1, 5, 10]),
        ({"logging_strategy": "epoch"}, [6, 12]),
        ({"logging_strategy": "epoch", "logging_first_step": True}, [1, 6, 12]),
        ({"logging_strategy": "no", "logging_steps": 1}, []),
        ({"logging_steps": -1}, [12]),
        # A quarter of 12 steps; a share that is no whole number of steps is rounded up.
        ({"logging_steps": 0.25}, [3, 6, 9, 12]),
        ({"logging_steps": 0.3}, [4, 8, 12]),
    ],
)
def test_losses_are_logged_when_asked_for(tmp_path: Path, options: dict[str, Any], logged: list[int]) -> None:
    history = run(tmp_path, **options).state.log_history
    assert [entry["step"] for entry in history if "loss" in entry] == logged


def test_intervals_may_change_while_training(tmp_path: Path) -> None:
    class LogMoreOften(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.logging_steps = 2

    history = run(tmp_path, logging_steps=3, callbacks=[LogMoreOften()]).state.log_history
    assert [entry["step"] for entry in history if "loss" in entry] == [3, 4, 6, 8, 10, 12]


def test_state_holds_the_intervals_in_steps(tmp_path: Path) -> None:
    state = run(tmp_path, logging_steps=0.3, eval_strategy="steps", eval_steps=0.5, save_steps=7).state
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (4, 6, 7)
    assert (state.max_steps, state.num_train_epochs, state.train_batch_size) == (12, 2, 4)


def test_log_line_holds_the_numbers_of_its_step(tmp_path: Path) -> None:
    trainer = run(tmp_path, logging_steps=1, learning_rate=0.12, include_num_input_tokens_seen=False)
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(line.keys() == {"loss", "grad_norm", "learning_rate", "epoch", "step"} for line in lines)
    # Each step's rate is the one it was made with: the first has the full one, and the last is not yet 0.
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.01 * (12 - step) for step in range(12)])
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[5]["epoch"] == 1.0
    assert lines[-1]["epoch"] == 2.0


def test_speed_counts_what_was_really_trained(tmp_path: Path) -> None:
    # 22 samples in batches of 4 and 2: no step has a full window, and the plan's product would say 48.
    metrics = run(tmp_path).state.log_history[-1]
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(44, rel=0.04)
    assert metrics["train_steps_per_second"] * metrics["train_runtime"] == pytest.approx(12, rel=0.04)
    metrics = run(tmp_path, max_steps=7).state.log_history[-1]
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(26, rel=0.04)


def test_train_and_evaluate_report_their_documented_numbers(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    line = trainer.state.log_history[-1]
    assert line.keys() == {
        "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss", "epoch",
        "step",
    }  # fmt: skip
    assert trainer.evaluate().keys() == {
        "eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch",
    }  # fmt: skip


def test_the_epoch_is_a_number_from_the_beginning_on(tmp_path: Path) -> None:
    seen: list[float] = []

    class Curriculum(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.state.epoch)
            self.log({"share": 0.5 + self.state.epoch})
            return super().compute_loss(*args, **kwargs)

    trainer = Curriculum(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows(8))
    trainer.train()
    assert seen == [0.0, 0.5]
    assert trainer.state.log_history[0] == {"share": 0.5, "epoch": 0.0, "step": 0}


def test_results_do_not_tell_how_long_the_model_took_to_place(tmp_path: Path) -> None:
    rows = make_rows(4)
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
    found = {**trainer.evaluate(), **trainer.predict(rows).metrics}
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text("utf-8")
    assert not [text for text in (*found, card) if "preparation" in text]
