"""The best checkpoint stays, whichever of an evaluation and a save of the same step comes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.resuming import Signal, StopAt
from support.tiny import Net, at, make_arguments, make_rows

from hftrain import SavePolicy, Trainer, set_seed
from hftrain.preemption.signals import TrainingStopped

# Of the evaluations after steps 4, 8, 12 and 16.
SCORES = {4: 0.9, 8: 0.1, 12: 0.3, 16: 0.2}


def ask_at_8(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Ask for an evaluation at the end of a step, as a callback of a user may."""
    control.should_evaluate |= state.global_step == 8


def make(folder: Path, *callbacks: Any, scores: dict[int, float] | None = None, **options: Any) -> Trainer:
    """Return a trainer of 4 steps a pass, evaluated at the end of each, with a score that its step decides."""
    set_seed(1)
    policy = options.pop("save_policy", None)
    defaults = {"eval_strategy": "epoch", "save_strategy": "steps"}
    defaults |= {} if "max_steps" in options else {"num_train_epochs": 4}
    arguments = make_arguments(folder, metric_for_best_model="score", greater_is_better=True, **(defaults | options))

    def score(prediction: Any) -> dict[str, float]:
        return {"score": (scores or SCORES).get(trainer.state.global_step, 0.0)}

    trainer = Trainer(
        Net(), arguments, train_dataset=make_rows(16), eval_dataset=make_rows(4, seed=2), compute_metrics=score,
        callbacks=list(callbacks), save_policy=policy,
    )  # fmt: skip
    return trainer


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


KEEPS = {
    "limit": {"save_total_limit": 2},
    "keep_best": {"save_policy": SavePolicy(keep_best=1)},
    "async": {"save_total_limit": 2, "save_policy": SavePolicy(save_async=True)},
    "async keep_best": {"save_policy": SavePolicy(keep_best=1, save_async=True)},
}


@pytest.mark.parametrize("stop", [None, 4, 5, 9], ids=str)
@pytest.mark.parametrize("save_steps", [4, 2, 1])
@pytest.mark.parametrize("keeps", KEEPS.values(), ids=KEEPS)
def test_best_checkpoint_saved_before_its_evaluation_stays(tmp_path, keeps, save_steps, stop):
    options = {"save_steps": save_steps, **keeps}
    if stop is not None:
        make(tmp_path, StopAt(stop), **options).train()
    trainer = make(tmp_path, **options)
    trainer.train(resume_from_checkpoint=None if stop is None else True)
    assert steps_in(tmp_path) == [4, 16]
    assert trainer.state.best_global_step == 4
    assert Path(trainer.state.best_model_checkpoint) == tmp_path / "checkpoint-4"
    state = json.loads((tmp_path / "checkpoint-16" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]) == tmp_path / "checkpoint-4"


@pytest.mark.parametrize("save_async", [False, True], ids=["waits", "async"])
def test_best_checkpoint_of_the_last_step_is_known_at_the_end(tmp_path, save_async):
    # The last save comes before the evaluation that finds it the best, and no save follows.
    policy = SavePolicy(save_async=save_async)
    trainer = make(tmp_path, scores={16: 0.9}, save_steps=4, save_total_limit=1, save_policy=policy)
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint) == tmp_path / "checkpoint-16"
    assert steps_in(tmp_path) == [16]


@pytest.mark.parametrize("save_async", [False, True], ids=["waits", "async"])
def test_several_best_checkpoints_saved_before_their_evaluation_stay(tmp_path, save_async):
    policy = SavePolicy(keep_best=2, save_async=save_async)
    make(tmp_path, StopAt(13), save_steps=1, save_policy=policy).train()
    assert steps_in(tmp_path) == [4, 12, 13]
    make(tmp_path, save_steps=1, save_policy=policy).train(resume_from_checkpoint=True)
    assert steps_in(tmp_path) == [4, 12, 16]


def test_a_step_saved_again_counts_with_its_new_evaluation(tmp_path):
    policy = SavePolicy(keep_best=1)
    make(tmp_path, StopAt(6), save_steps=3, save_policy=policy).train()
    assert steps_in(tmp_path) == [6]
    make(
        tmp_path, StopAt(9), at("on_step_end", ask_at_8), save_steps=1, save_policy=policy, scores={4: 0.1, 8: 0.5}
    ).train(resume_from_checkpoint=True)
    # Evaluated twice at step 8: before it was saved, and after.
    assert steps_in(tmp_path) == [8, 9]


def test_a_resume_into_another_folder_finds_the_best_one_in_the_old(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    make(old, StopAt(4), save_steps=4).train()
    trainer = make(new, save_steps=4, save_total_limit=1)
    trainer.train(resume_from_checkpoint=str(old / "checkpoint-4"))
    assert Path(trainer.state.best_model_checkpoint) == old / "checkpoint-4"
    assert steps_in(old) == [4]


def test_best_checkpoint_named_by_an_override_stays(tmp_path):
    class Own(Trainer):
        def _determine_best_metric(self, metrics: Any, trial: Any = None) -> bool:
            is_better = self.state.best_metric is None or metrics["eval_score"] > self.state.best_metric
            if is_better:
                self.state.best_metric, self.state.best_global_step = metrics["eval_score"], self.state.global_step
            return is_better

    arguments = make(tmp_path, save_steps=1, save_total_limit=2).args
    trainer = Own(
        Net(), arguments, train_dataset=make_rows(16), eval_dataset=make_rows(4, seed=2),
        compute_metrics=lambda prediction: {"score": SCORES[trainer.state.global_step]},
    )  # fmt: skip
    trainer.train()
    assert steps_in(tmp_path) == [4, 16]


@pytest.mark.parametrize("keep_best", [None, 1])
@pytest.mark.parametrize("name", [None, "SIGTERM", "SIGUSR1"])
def test_best_step_without_a_planned_checkpoint_is_told_of(tmp_path, caplog, name, keep_best):
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True, "max_steps": 8,
        "scores": {2: 0.1, 4: 0.2, 6: 0.9, 8: 0.3}, "save_policy": SavePolicy(keep_best=keep_best),
    }  # fmt: skip
    if name == "SIGTERM":
        with pytest.raises(TrainingStopped):
            make(tmp_path, Signal(6), **options).train()
        assert steps_in(tmp_path)[-1] == 6
    trainer = make(tmp_path, *([Signal(6, name)] if name == "SIGUSR1" else []), **options)
    trainer.train(resume_from_checkpoint=name == "SIGTERM")
    assert trainer.state.best_global_step == 6
    assert "checkpoint-4 is loaded" in caplog.text
