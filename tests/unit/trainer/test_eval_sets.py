"""Several evaluation sets: names, metrics and cadences of their own, and the best model chosen on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.tiny import Net, at, make_arguments, make_rows, train

from hftrain import ConfigError, EvalPrediction, EvalSet, Trainer


def count(name: str) -> Any:
    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        return {name: float(len(prediction.label_ids))}

    return metrics


def evaluated(trainer: Trainer, name: str) -> list[int]:
    """Return the steps at which a set was evaluated."""
    return [entry["step"] for entry in trainer.state.log_history if f"eval_{name}_loss" in entry]


def make_trainer(folder: Path, sets: dict[str, Any], **options: Any) -> Trainer:
    options = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "compute_metrics": count("common"), **options}
    return tiny.make_trainer(folder, train_dataset=make_rows(8), eval_dataset=sets, **options)


def test_each_set_has_its_own_metrics(tmp_path: Path) -> None:
    sets = {"a": make_rows(3), "b": EvalSet(make_rows(5), metrics=count("own")), "c": EvalSet(make_rows(6))}
    trainer = make_trainer(tmp_path, sets)
    metrics = trainer.evaluate()
    assert (metrics["eval_a_common"], metrics["eval_b_own"], metrics["eval_c_common"]) == (3, 5, 6)
    assert not {"eval_b_common", "eval_a_own"} & metrics.keys()
    assert trainer.evaluate("b")["eval_own"] == 5
    assert trainer.evaluate({"d": EvalSet(make_rows(2), metrics=count("own"))})["eval_d_own"] == 2
    assert "eval_common" in trainer.evaluate(make_rows(2))
    assert trainer.eval_dataset["b"] == sets["b"].dataset


def test_set_may_have_metrics_where_the_trainer_has_none(tmp_path: Path) -> None:
    trainer = train(
        tmp_path, train_dataset=make_rows(8),
        eval_dataset={"a": make_rows(3), "b": EvalSet(make_rows(5), metrics=count("own"))}, max_steps=4,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_b_own", greater_is_better=True,
    )  # fmt: skip
    assert trainer.state.best_metric == 5
    assert trainer.state.best_model_checkpoint is not None


def test_each_set_has_its_own_cadence_in_steps(tmp_path: Path) -> None:
    sets = {"often": make_rows(3), "seldom": EvalSet(make_rows(3), every=4), "last": EvalSet(make_rows(3), every=8)}
    trainer = make_trainer(tmp_path, sets, eval_on_start=True)
    trainer.train()
    assert evaluated(trainer, "often") == [0, 2, 4, 6, 8]
    assert evaluated(trainer, "seldom") == [0, 4, 8]
    assert evaluated(trainer, "last") == [0, 8]
    assert {"eval_often_loss", "eval_seldom_loss", "eval_last_loss"} <= trainer.evaluate().keys()


def test_each_set_has_its_own_cadence_in_epochs(tmp_path: Path) -> None:
    sets = {"often": make_rows(3), "seldom": EvalSet(make_rows(3), every=3)}
    trainer = make_trainer(tmp_path, sets, eval_strategy="epoch", eval_steps=None, max_steps=-1, num_train_epochs=6)
    trainer.train()
    assert evaluated(trainer, "often") == [2, 4, 6, 8, 10, 12]
    assert evaluated(trainer, "seldom") == [6, 12]


def test_best_model_follows_a_set_that_is_evaluated_seldom(tmp_path: Path) -> None:
    sets = {"often": make_rows(3), "seldom": EvalSet(make_rows(5), every=4)}
    trainer = make_trainer(
        tmp_path, sets, metric_for_best_model="eval_seldom_loss", load_best_model_at_end=True, save_strategy="steps",
        save_steps=4,
    )  # fmt: skip
    trainer.train()
    losses = {
        entry["step"]: entry["eval_seldom_loss"] for entry in trainer.state.log_history if "eval_seldom_loss" in entry
    }
    assert set(losses) == {4, 8}
    assert trainer.state.best_metric == min(losses.values())
    best = min(losses, key=losses.__getitem__)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert trainer.evaluate("seldom")["eval_loss"] == pytest.approx(losses[best], rel=1e-6)


def test_schedule_follows_a_set_that_is_evaluated_seldom(tmp_path: Path) -> None:
    seen = []

    watch = at("on_step_end", lambda *args, lr_scheduler=None, **kwargs: seen.append(lr_scheduler.last_epoch))
    sets = {"often": make_rows(3), "seldom": EvalSet(make_rows(5), every=4)}
    trainer = make_trainer(
        tmp_path, sets, metric_for_best_model="eval_seldom_loss", lr_scheduler_type="reduce_lr_on_plateau"
    )
    trainer.add_callback(watch)
    trainer.train()
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_cadence_is_a_positive_whole_number(every: Any) -> None:
    with pytest.raises(ConfigError, match="positive whole numbers"):
        EvalSet([1], every=every)


def test_cadence_must_meet_the_runs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a' is to be evaluated every 3 steps.*multiple of eval_steps"):
        make_trainer(tmp_path, {"a": EvalSet(make_rows(3), every=3)})
    # A share of the run is known in steps only when the run begins.
    trainer = make_trainer(tmp_path, {"a": EvalSet(make_rows(3), every=3)}, eval_steps=0.25)
    with pytest.raises(ConfigError, match="evaluates every 2 steps"):
        trainer.train()


def test_set_needs_data_and_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no dataset"):
        EvalSet(None)
    with pytest.raises(ConfigError, match="has no name for its metrics"):
        Trainer(Net(), make_arguments(tmp_path), eval_dataset=EvalSet(make_rows(3)))
