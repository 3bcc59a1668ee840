"""Loops of a user's own: they train what they should, resume to the last bit, stop on a signal, or are refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_loops import Generate, InTurn, KFold, Pair, UntilCertain
from support.resuming import StopAt, assert_same, outcome
from support.tiny import Stream, at, make_resumable, make_rows
from torch import nn

from hftrain import (
    CheckpointError,
    ConfigError,
    EvaluateLoop,
    FitLoop,
    PredictLoop,
    SavePolicy,
    TaskError,
    Trainer,
    TrainerCallback,
    loops,
    set_seed,
)
from hftrain.loops.contract import LoopStates
from hftrain.preemption.signals import TrainingStopped


def make_trainer(folder: Path, loop: Any, **options: Any) -> Trainer:
    given = {"train_dataset": make_rows(20), "eval_dataset": make_rows(40, seed=2), "save_strategy": "no", **options}
    return make_resumable(folder, seed=3, loop=loop, **given)


def pair() -> tuple[Generate, InTurn]:
    set_seed(5)
    return Generate(Pair()), InTurn()


def loop_and_model(name: str) -> tuple[Any, Any]:
    model, loop = pair() if name == "in turn" else (None, KFold(2))
    return loop, model


# -- how a loop is given ---------------------------------------------------------------------------------------------


class Counting(FitLoop):
    num_steps: int

    def attach(self, parts: Any) -> None:
        super().attach(parts)
        self.num_steps = 0

    def run_step(self, window: list[Any], num_items: Any) -> None:
        self.num_steps += 1
        super().run_step(window, num_items)


class PutsDataInPlace(Trainer):
    def get_train_dataloader(self) -> Any:
        self.train_dataset = make_rows(8)
        return super().get_train_dataloader()


def test_loop_gets_the_dataset_that_the_loader_was_made_of(tmp_path: Path) -> None:
    loop = Counting()
    trainer = make_trainer(tmp_path, loop, kind=PutsDataInPlace)
    found: list[int] = []
    look = at("on_step_end", lambda *args, **kwargs: found.append(len(loop.parts.dataset)))
    trainer.add_callback(look)
    trainer.train()
    assert set(found) == {8}


def test_class_instance_name_and_sequence_are_taken(tmp_path: Path) -> None:
    own = Counting()
    for loop in (own, Counting, [own, UntilCertain], "fit", ["fit", "evaluate", "predict"], None, ()):
        make_trainer(tmp_path, loop, max_steps=1).train()
    assert own.num_steps == 1
    assert not own.is_attached


def test_registered_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops.loops, "_entries", dict(loops.loops._entries))
    loops.register("folds_of_two", KFold, num_folds=2)
    trainer = make_trainer(tmp_path, "folds_of_two", max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4
    assert {"eval_fold_0_loss", "eval_fold_1_loss"} <= {name for line in trainer.state.log_history for name in line}


@pytest.mark.parametrize(
    ("loop", "error", "message"),
    [
        ("fitt", ConfigError, "Did you mean 'fit'"),
        ([FitLoop, Counting()], ConfigError, "both run the stage 'fit'"),
        (nn.Identity, TaskError, "derive your own from FitLoop, EvaluateLoop or PredictLoop"),
        (type("Typo", (FitLoop,), {"unsupported": {"resumee": "x"}}), ConfigError, "Did you mean 'resume'"),
        (type("Astray", (FitLoop,), {"stage": "predict"}), TaskError, "Derive it from EvaluateLoop"),
    ],
)
def test_what_is_not_a_loop_is_refused(tmp_path: Path, loop: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_trainer(tmp_path, loop)


# -- what a loop does not support ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "options", "message"),
    [
        ("accumulation", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 with the loop Narrow: why"),
        ("auto_find_batch_size", {"auto_find_batch_size": True}, "Leave auto_find_batch_size out"),
        ("saving", {"save_strategy": "steps"}, "save_strategy='steps' .* Set save_strategy='no'"),
        ("signals", {}, r"SavePolicy\(on_signal=True\), the default, .*SavePolicy\(on_signal=False\)"),
        ("signals", {"save_policy": SavePolicy(on_signal=False, every_s=9.0)}, r"every_s=9.0"),
        ("streams", {"train_dataset": Stream(make_rows(8)), "max_steps": 2}, "a stream with"),
    ],
)
def test_what_a_loop_does_not_support_is_refused_before_the_run(
    tmp_path: Path, feature: str, options: dict[str, Any], message: str
) -> None:
    loop = type("Narrow", (FitLoop,), {"unsupported": {feature: "why."}})
    begun: list[str] = []
    begin = at("on_train_begin", lambda *args, **kwargs: begun.append("begun"))
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, loop, callbacks=[begin], **options).train()
    assert begun == []


def test_resume_that_a_loop_does_not_support_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, None, max_steps=2, save_strategy="steps", save_steps=1).train()
    loop = type("Narrow", (FitLoop,), {"unsupported": {"resume": "why"}})
    with pytest.raises(ConfigError, match="Start a new run: leave resume_from_checkpoint out"):
        make_trainer(tmp_path, loop, max_steps=2).train(resume_from_checkpoint=True)


def test_resume_with_another_batch_size_is_refused_by_a_loop_that_counts_batches(tmp_path: Path) -> None:
    make_trainer(tmp_path, KFold(2), max_steps=4, save_strategy="steps", save_steps=1).train()
    trainer = make_trainer(tmp_path, KFold(2), max_steps=4, per_device_train_batch_size=2)
    with pytest.raises(ConfigError, match="another number of processes or batch size with the loop KFold"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# -- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [2, 5, 8])
@pytest.mark.parametrize("name", ["folds", "in turn"])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, name: str, stop: int) -> None:
    options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1}
    loop, model = loop_and_model(name)
    whole = make_trainer(tmp_path / "whole", loop, model=model, **options)
    whole.train()
    expected = loop.state_dict()
    loop, model = loop_and_model(name)
    make_trainer(tmp_path / "cut", loop, model=model, callbacks=[StopAt(stop)], **options).train()
    loop, model = loop_and_model(name)
    resumed = make_trainer(tmp_path / "cut", loop, model=model, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"cut/checkpoint-{stop}"))
    assert_same(outcome(resumed), outcome(whole))
    assert_same(loop.state_dict(), expected)


@pytest.mark.parametrize("name", ["folds", "in turn"])
def test_signal_stops_a_loop_that_keeps_the_contract(tmp_path: Path, name: str) -> None:
    options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 50}
    loop, model = loop_and_model(name)
    whole = make_trainer(tmp_path / "whole", loop, model=model, **options)
    whole.train()
    expected = outcome(whole)

    class Strike(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    loop, model = loop_and_model(name)
    with pytest.raises(TrainingStopped):
        make_trainer(tmp_path / "cut", loop, model=model, callbacks=[Strike], **options).train()
    loop, model = loop_and_model(name)
    resumed = make_trainer(tmp_path / "cut", loop, model=model, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(resumed), expected)


def test_checkpoint_of_a_plain_run_goes_on_with_a_loop_that_has_a_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, None, max_steps=2, save_strategy="steps", save_steps=1).train()
    trainer = make_trainer(tmp_path, KFold(2), max_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "has no state for KFold" in caplog.text


def test_loop_without_a_state_is_missed_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    LoopStates({"fit": Counting(), "evaluate": UntilCertain()}).load_state_dict({})
    assert not caplog.text


def test_checkpoint_of_a_loop_with_a_state_is_refused_without_it(tmp_path: Path) -> None:
    make_trainer(tmp_path, KFold(2), max_steps=4, save_strategy="steps", save_steps=1).train()
    with pytest.raises(CheckpointError, match="Pass the same loop=, or start a new run"):
        make_trainer(tmp_path, None, max_steps=4).train(resume_from_checkpoint=True)


# -- what they do ----------------------------------------------------------------------------------------------------


def test_each_fold_starts_anew_and_is_evaluated_on_what_it_left_out(tmp_path: Path) -> None:
    loop = KFold(3)
    trainer = make_trainer(tmp_path, loop, max_steps=9, learning_rate=0.1)
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    assert rates[:3] == rates[3:6] == rates[6:9]
    assert len(loop.scores) == 3
    assert len(set(loop.scores)) == 3


def test_both_models_learn(tmp_path: Path) -> None:
    task, loop = pair()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    make_trainer(tmp_path, loop, model=task, max_steps=6).train()
    assert not any(torch.equal(before[name], value) for name, value in task.state_dict().items())


def test_rehearsal_leaves_the_loop_and_the_models_as_they_were(tmp_path: Path) -> None:
    task, loop = pair()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    make_trainer(tmp_path, loop, model=task, max_steps=6, fast_dev_run=2, save_strategy="steps").train()
    assert_same(dict(task.state_dict()), before)
    assert "optimizer" not in vars(loop)


def accuracy(prediction: Any) -> dict[str, float]:
    is_right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(is_right.mean()), "seen": len(is_right)}


def test_evaluation_stops_when_the_metric_is_certain(tmp_path: Path) -> None:
    seen = []
    for margin in (0.01, 0.2, 0.9):
        trainer = make_trainer(tmp_path, UntilCertain(margin), compute_metrics=accuracy)
        seen.append(trainer.evaluate()["eval_seen"])
        assert trainer.evaluate()["eval_seen"] == seen[-1]
    assert seen[0] == 40
    assert seen[2] == 8 < seen[1] < 40


def test_training_evaluates_with_the_loop(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, UntilCertain(0.9), compute_metrics=accuracy, max_steps=2, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert [line["eval_seen"] for line in trainer.state.log_history if "eval_seen" in line] == [8, 8]


def test_early_stop_ends_metrics_of_each_batch(tmp_path: Path) -> None:
    told: list[tuple[int, bool]] = []

    def count(prediction: Any, compute_result: bool) -> dict[str, float]:
        told.append((len(prediction.label_ids), compute_result))
        return {"seen": sum(number for number, _ in told)} if compute_result else {}

    trainer = make_trainer(tmp_path, UntilCertain(0.9), compute_metrics=count, batch_eval_metrics=True)
    assert trainer.evaluate()["eval_seen"] == 8
    assert [is_last for _, is_last in told] == [False] * (len(told) - 1) + [True]


def test_what_an_evaluation_loop_does_not_support_is_refused_before_the_training(tmp_path: Path) -> None:
    loop = type("Narrow", (EvaluateLoop,), {"unsupported": {"batch_eval_metrics": "why"}})
    trainer = make_trainer(
        tmp_path,
        loop,
        compute_metrics=lambda prediction, compute_result: {},
        batch_eval_metrics=True,
        eval_strategy="epoch",
    )
    with pytest.raises(ConfigError, match=r"batch_eval_metrics=True with the loop Narrow: why\. Set"):
        trainer.train()
    assert trainer.state.global_step == 0


class Unsavable(FitLoop):
    def state_dict(self) -> dict[str, Any]:
        return {"parts": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_state_that_no_checkpoint_can_hold_is_refused_with_the_loops_name(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Unsavable, save_strategy="steps", save_steps=2)
    with pytest.raises(ConfigError, match="Cannot save the state of Unsavable in each checkpoint"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_state_of_a_loop_that_waits_for_its_stage_is_looked_at_before_the_work(tmp_path: Path) -> None:
    kind = type("Waits", (EvaluateLoop,), {"state_dict": lambda self: {"parts": object()}})
    trainer = make_trainer(tmp_path, kind, save_strategy="steps", save_steps=2)
    with pytest.raises(ConfigError, match="Cannot save the state of Waits in each checkpoint"):
        trainer.train()
    assert trainer.state.global_step == 0


class FirstTwo(PredictLoop):
    def attach(self, parts: Any) -> None:
        super().attach(parts)
        self.num_batches = 0

    def should_stop(self, output: Any) -> bool:
        self.num_batches += 1
        return self.num_batches == 2


def test_prediction_that_stops_returns_what_it_has(tmp_path: Path) -> None:
    rows = make_rows(20, seed=4)
    whole = make_trainer(tmp_path, None).predict(rows)
    cut = make_trainer(tmp_path, FirstTwo).predict(rows)
    assert cut.predictions.tolist() == whole.predictions[:8].tolist()


def test_evaluation_within_the_same_loop_is_refused(tmp_path: Path) -> None:
    again = at("on_prediction_step", lambda *args, **kwargs: trainer.evaluate())
    trainer = make_trainer(tmp_path, UntilCertain(), callbacks=[again], compute_metrics=accuracy)
    with pytest.raises(ConfigError, match="do not evaluate within an evaluation"):
        trainer.evaluate()


class Noting(EvaluateLoop):
    total = 0

    def attach(self, parts: Any) -> None:
        super().attach(parts)
        self.total += 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_state_of_an_evaluation_loop_is_kept_in_checkpoints(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, Noting, callbacks=[StopAt(2)], **options).train()
    loop = Noting()
    make_trainer(tmp_path, loop, **options).train(resume_from_checkpoint=True)
    assert loop.total == 4
