"""Features as a stranger would publish them: on events and `checkpoint_objects` alone, exact over a resume."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hftrain import TaskModule, Trainer, TrainerCallback, TrainingArguments

NUM_STEPS = 12


class Guard(TrainerCallback):
    """Skip updates whose gradients are not finite, and log how many were skipped."""

    def __init__(self) -> None:
        self.num = torch.zeros((), dtype=torch.int64)

    def checkpoint_objects(self) -> dict[str, Any]:
        return {"num": self.num}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = list(kwargs["model"].parameters())
        if not all(bool(torch.isfinite(each.grad).all()) for each in parameters):
            self.num += 1
            for each in parameters:
                each.grad = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["logs"]["skipped"] = int(self.num)


class Journal(TrainerCallback):
    """Append each log entry to a file; a resume cuts what was written after the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoint_objects(self) -> dict[str, Any]:
        return {"file": self}

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.path.stat().st_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        os.truncate(self.path, state["size"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        entry = {"step": state.global_step, **{name: kwargs["logs"].get(name) for name in ("loss", "skipped")}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Best(TrainerCallback):
    """Keep the weights of the best evaluation, and end with them."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {"loss": float("inf"), "weights": None}

    def checkpoint_objects(self) -> dict[str, Any]:
        return {"kept": self}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (loss := kwargs["metrics"]["eval_loss"]) < self.kept["loss"]:
            self.kept = {"loss": loss, "weights": copy.deepcopy(kwargs["model"].state_dict())}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].load_state_dict(self.kept["weights"])


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)

    def evaluation_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.evaluation_step(batch) * (float("inf") if bool((batch["x"] > 90).any()) else 1)


class Kill(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            raise InterruptedError


def train(folder: Path, *, at: int = 0, resume: str | None = None) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(4, generator=generator), "y": index % 3} for index in range(24)]
    data[5]["x"][0] = 99
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=NUM_STEPS, learning_rate=0.3,
        per_device_train_batch_size=4, logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=2,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    guard, journal, best = Guard(), Journal(folder / "own.jsonl"), Best()
    trainer = Trainer(Task(), args, train_dataset=data, eval_dataset=data[:9], callbacks=[guard, journal, best])
    trainer.add_callback(Kill(at))
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.weight.tolist(), int(guard.num), best.kept["loss"], journal.path.read_text("utf-8")


@pytest.mark.filterwarnings("ignore:The loss was NaN or infinite")
def test_strangers_features_continue_exactly_after_a_kill(tmp_path: Path) -> None:
    expected = train(tmp_path / "whole")
    assert expected[1] == 2
    for at in range(3, NUM_STEPS):
        with pytest.raises(InterruptedError):
            train(tmp_path / str(at), at=at)
        assert train(tmp_path / str(at), resume="auto") == expected
