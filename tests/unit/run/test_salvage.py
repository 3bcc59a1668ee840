"""What an error leaves behind with `SavePolicy(on_exception=True)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Noisy, make_arguments, make_rows
from torch import nn

from hftrain import SavePolicy, Trainer, TrainerCallback, set_seed
from hftrain.checkpoint.manifest import list_checkpoints

WHERE = ("take", "forward", "update", "step_end", "evaluate")


class Failure(Exception):
    """Raised once, on purpose."""


class Normed(nn.Module):
    """A network that changes a buffer in each forward pass, and can fail after it."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(4), Net(dropout=0.3)
        self.fails_at: int | None = None
        self.num_calls = 0

    def floating_point_ops(self, inputs: Any) -> int:
        return 1

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        outputs = self.net(self.norm(x), labels)
        self.num_calls += self.training
        if self.num_calls == self.fails_at and self.training:
            raise Failure
        return outputs


class Fail(TrainerCallback):
    def __init__(self, where: str) -> None:
        self.where = where

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.where == "update" and state.global_step == 5:
            raise Failure

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.where == "step_end" and state.global_step == 6:
            raise Failure

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.where == "evaluate" and state.global_step == 6:
            raise Failure


class Rows(Noisy):
    """Fails while the batch after step 5 is made."""

    fails_at: int | None = None
    num_read = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_read += 1
        row = super().__getitem__(index)
        if self.num_read == self.fails_at:
            raise Failure
        return row


def make_trainer(folder: Path, where: str = "", policy: SavePolicy | None = None) -> Trainer:
    set_seed(4)
    model, rows = Normed(), Rows(make_rows(46))
    # Accumulation 2: step 6 takes the 11th and the 12th micro-batch of 4 rows.
    model.fails_at = 12 if where == "forward" else None
    rows.fails_at = 46 if where == "take" else None
    return Trainer(
        model,
        make_arguments(
            folder, max_steps=10, gradient_accumulation_steps=2, logging_steps=3, save_strategy="steps", save_steps=100,
            eval_strategy="steps", eval_steps=3, include_num_input_tokens_seen=True,
        ),
        train_dataset=rows,
        eval_dataset=make_rows(7, seed=2),
        callbacks=[Fail(where)],
        save_policy=policy or SavePolicy(on_exception=True),
    )  # fmt: skip


def outcome(trainer: Trainer) -> list[Any]:
    history = [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second", "ation_time"))}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    return [history, trainer.state.total_flos, [tensor.tolist() for tensor in trainer.model.state_dict().values()]]


@pytest.mark.parametrize("where", WHERE)
def test_run_that_failed_resumes_as_if_it_had_not(tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(Failure):
        make_trainer(tmp_path / "run", where).train()
    found = [path.name for path in list_checkpoints(tmp_path / "run")]
    if where == "update":
        assert found == []
        assert "while step 6 changed the weights" in caplog.text
        return
    assert found == ["checkpoint-5" if where in ("take", "forward") else "checkpoint-6"]
    assert "the last whole one, after Failure" in caplog.text
    resumed = make_trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint="auto")
    assert outcome(resumed) == outcome(whole)


def test_nothing_is_saved_unasked(tmp_path: Path) -> None:
    with pytest.raises(Failure):
        make_trainer(tmp_path, "forward", SavePolicy()).train()
    assert list_checkpoints(tmp_path) == []


def test_step_that_is_saved_is_not_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, "forward")
    trainer.args.save_steps = 5
    with pytest.raises(Failure):
        trainer.train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-5"]
    assert "the last whole one" not in caplog.text


def test_error_in_saving_after_an_error_leaves_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, "forward")
    monkeypatch.setattr(trainer, "save_model", lambda *_, **__: 1 / 0)
    with pytest.raises(Failure):
        trainer.train()
    assert "failed too" in caplog.text
