"""`evaluate(ckpt=...)` and `predict(ckpt=...)`: the checkpoint's weights, and afterwards the live ones to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, StepEngine, make_arguments, make_rows

from hftrain import EMA, CheckpointError, ConfigError, Trainer, set_seed


class Normed(Net):
    """Its buffers change in training, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return super().forward(self.norm(x), labels)


def make(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    set_seed(3)
    parts = {name: options.pop(name, None) for name in ("strategy", "precision")}
    settings: dict[str, Any] = {"max_steps": 4, "learning_rate": 0.5, "save_strategy": "steps", "save_steps": 1}
    args = make_arguments(folder, **{**settings, "eval_strategy": "steps", "eval_steps": 1, **options})
    rows = make_rows(16)
    return Trainer(Normed(), args, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks), **parts)


def losses(trainer: Trainer) -> dict[int, float]:
    return {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}


def test_each_checkpoint_gives_its_own_loss_and_the_live_weights_return(tmp_path: Path) -> None:
    trainer = make(tmp_path, metric_for_best_model="loss", greater_is_better=True)
    trainer.train()
    known = losses(trainer)
    assert len(set(known.values())) == 4
    live = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    best = max(known, key=lambda step: known[step])
    assert trainer.evaluate(ckpt="best")["eval_loss"] == known[best]
    assert trainer.evaluate(ckpt="last")["eval_loss"] == known[4]
    for step in (1, 2):
        assert trainer.evaluate(ckpt=tmp_path / f"checkpoint-{step}")["eval_loss"] == known[step]
        output = trainer.predict(make_rows(16), ckpt=f"checkpoint-{step}")
        assert output.metrics["test_loss"] == known[step]
    assert all(torch.equal(live[name], value) for name, value in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_loss"] == known[4]


@pytest.mark.parametrize("optim", ["adamw_torch", "schedule_free_adamw"])
def test_an_evaluation_of_an_older_checkpoint_leaves_no_trace_in_training(tmp_path: Path, optim: str) -> None:
    if optim != "adamw_torch":
        pytest.importorskip("schedulefree")

    class Older:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                seen.append(looking.evaluate(ckpt=tmp_path / "a" / "checkpoint-1")["eval_loss"])

    seen: list[float] = []
    looking = make(tmp_path / "a", Older(), optim=optim)
    looking.train()
    plain = make(tmp_path / "b", optim=optim)
    plain.train()
    assert seen == [losses(plain)[1]]
    found, wanted = looking.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16_true"])
def test_a_trainer_that_has_not_trained_shows_a_checkpoint_in_its_own_dtype(tmp_path: Path, precision: str) -> None:
    trained = make(tmp_path, precision=precision)
    trained.train()
    fresh = make(tmp_path, precision=precision)
    before = fresh.evaluate()["eval_loss"]
    for trainer in (fresh, make(tmp_path, precision=precision)):
        assert trainer.evaluate(ckpt="last")["eval_loss"] == losses(trained)[4]
        assert trainer.predict(make_rows(16), ckpt="last").metrics["test_loss"] == losses(trained)[4]
        assert trainer.evaluate()["eval_loss"] == before != losses(trained)[4]


def test_weights_return_after_an_error(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    live = trainer.model.norm.running_mean.clone()
    trainer.compute_metrics = lambda prediction: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(ckpt=f"{tmp_path}/checkpoint-1")
    assert torch.equal(trainer.model.norm.running_mean, live)


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_strategy="no")
    for ckpt in ("best", "last"):
        with pytest.raises(CheckpointError, match=f"There is no {ckpt} checkpoint"):
            trainer.evaluate(ckpt=ckpt)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        trainer.evaluate(ckpt=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="'average' or 'live'"):
        trainer.predict(make_rows(4), weights="mean")


def test_averages_are_refused_and_live_weights_are_not(tmp_path: Path) -> None:
    trainer = make(tmp_path, EMA(0.9))
    trainer.train()
    averaged = losses(trainer)[4]
    with pytest.raises(ConfigError, match="a callback that averages"):
        trainer.evaluate(ckpt="last")
    plain = make(tmp_path / "plain")
    plain.train()
    assert trainer.evaluate(ckpt="last", weights="live")["eval_loss"] == losses(plain)[4] != averaged


def test_engines_are_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, strategy=StepEngine(use_cpu=True))
    with pytest.raises(ConfigError, match="engine"):
        trainer.evaluate(ckpt="last")
