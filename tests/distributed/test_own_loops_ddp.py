"""Loops of a user's own on two processes: the same result in both, exact resumes, and refusals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.own_loops import Generate, InTurn, KFold, Pair, UntilCertain
from support.resuming import StopAt
from support.tiny import Net, make_arguments, make_rows, make_trainer

from hftrain import ConfigError, Trainer, TrainerCallback, set_seed
from hftrain.preemption.signals import TrainingStopped

pytestmark = pytest.mark.distributed


class Strike(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step >= 5:
            time.sleep(0.2)  # processes take up to half a second to agree


def train_folds(folder: str, *, stop: int | None = None, strikes: bool = False, resume: bool = False) -> dict[str, Any]:
    set_seed(7)
    loop = KFold(2)
    trainer = make_trainer(
        Path(folder), Net(dropout=0.2), train_dataset=make_rows(26),
        callbacks=[StopAt(stop), *([Strike] if strikes else [])], loop=loop, max_steps=12, save_strategy="steps",
        save_steps=50,
    )  # fmt: skip
    try:
        trainer.train(resume_from_checkpoint=resume)
    except TrainingStopped:
        return {"stopped": trainer.state.global_step}
    return {
        "scores": loop.scores,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "weights": [p.flatten().tolist() for p in trainer.model.parameters()],
    }


def test_folds_of_two_processes_resume_exactly(tmp_path: Path, run_distributed: Any) -> None:
    whole = run_distributed(train_folds, folder=str(tmp_path / "whole"))
    assert whole[0] == whole[1]
    assert len(whole[0]["scores"]) == 2
    run_distributed(train_folds, folder=str(tmp_path / "cut"), stop=8)
    assert run_distributed(train_folds, folder=str(tmp_path / "cut"), resume=True) == whole
    stopped = run_distributed(train_folds, folder=str(tmp_path / "struck"), strikes=True)
    assert stopped[0] == stopped[1]
    assert 5 < stopped[0]["stopped"] < 12
    assert run_distributed(train_folds, folder=str(tmp_path / "struck"), resume=True) == whole


def count_samples(prediction: Any) -> dict[str, float]:
    return {"seen": len(prediction.label_ids)}


def evaluate(folder: str) -> dict[str, Any]:
    set_seed(7)
    found = {}
    for margin in (0.01, 0.2, 0.9):
        # 21 rows in batches of 4: the second process has fewer batches.
        for rows in (21, 60):
            trainer = Trainer(
                Net(), make_arguments(Path(folder)), loop=UntilCertain(margin), compute_metrics=count_samples
            )
            found[f"{margin}, {rows}"] = trainer.evaluate(make_rows(rows))["eval_seen"]
    return found


def test_processes_stop_an_evaluation_together(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(evaluate, folder=str(tmp_path))
    assert first == second
    assert (first["0.01, 21"], first["0.01, 60"]) == (21, 60)
    assert first["0.9, 60"] == first["0.9, 21"] == 8
    assert 8 < first["0.2, 60"] < 60


def evaluate_split(folder: str) -> dict[str, Any]:
    found = {}
    for margin in (0.01, 0.9):
        for rows in (2, 13, 21):
            set_seed(7)
            trainer = Trainer(
                Net(),
                make_arguments(Path(folder), max_steps=1, save_strategy="no"),
                train_dataset=make_rows(8),
                eval_dataset=make_rows(rows),
                strategy="fsdp",
                loop=UntilCertain(margin),
                compute_metrics=count_samples,
            )
            trainer.train()
            found[f"{margin}, {rows}"] = trainer.evaluate()["eval_seen"]
    return found


def test_split_model_is_evaluated_until_certain_on_unequal_shares(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(evaluate_split, folder=str(tmp_path))
    assert first == second
    assert [first[f"0.01, {rows}"] for rows in (2, 13, 21)] == [2, 13, 21]
    assert [first[f"0.9, {rows}"] for rows in (2, 13, 21)] == [2, 8, 8]


def train_in_turn(folder: str) -> str:
    trainer = Trainer(Generate(Pair()), make_arguments(Path(folder)), train_dataset=make_rows(8), loop=InTurn())
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    return "trained"


def test_loop_for_one_process_is_refused(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(train_in_turn, folder=str(tmp_path))
    assert first == second
    assert first == (
        "Cannot use 2 processes with the loop InTurn: the critic's gradients are not exchanged. Run one process."
    )
