"""The Trainer with optimizers that want more of it than a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.optimizer_runs import make_run, weights_of
from support.resuming import StopAt

from hftrain import ConfigError, Trainer, TrainerCallback

pytestmark = pytest.mark.optimizers


class Watch(TrainerCallback):
    """Remember the weights at the end of each step, and what a save and an evaluation in the middle give."""

    trainer: Trainer

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained: list[dict[str, torch.Tensor]] = []
        self.saved: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trained.append(weights_of(self.trainer))
        if state.global_step == 3:
            self.trainer.save_model(str(self.folder))
            self.saved = load_file(self.folder / "model.safetensors")


def watched(tmp_path: Path, optim: str, **options: Any) -> tuple[Trainer, Watch]:
    watch = Watch(tmp_path / "extra")
    watch.trainer = make_run(tmp_path, optim, watch, **options)
    watch.trainer.train()
    return watch.trainer, watch


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def test_schedule_free_saves_and_evaluates_the_averaged_weights(tmp_path: Path) -> None:
    trainer, watch = watched(tmp_path, "schedule_free_adamw", eval_strategy="steps", eval_steps=4)
    last = load_file(tmp_path / "checkpoint-4/model.safetensors")
    for name, weight in weights_of(trainer).items():
        torch.testing.assert_close(last[name], weight)
    assert len(differing(last, watch.trained[-1])) == len(last)
    assert len(differing(watch.saved, watch.trained[2])) == len(last)
    logged = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(logged, rel=1e-6)
    other = make_run(tmp_path / "other", "adamw_torch")
    other.model.load_state_dict(last)
    assert other.evaluate()["eval_loss"] == pytest.approx(logged, rel=1e-6)


def test_schedule_free_goes_on_with_a_second_run(tmp_path: Path) -> None:
    trainer = make_run(tmp_path, "schedule_free_sgd", save_strategy="no")
    trainer.train()
    before = weights_of(trainer)
    trainer.train()
    assert differing(weights_of(trainer), before)


def test_schedule_free_warms_up(tmp_path: Path) -> None:
    trainer = make_run(tmp_path, "schedule_free_adamw", warmup_steps=3)
    trainer.train()
    assert trainer.optimizer is not None
    assert [group["warmup_steps"] for group in trainer.optimizer.param_groups] == [3, 3]
    assert trainer.get_learning_rates() == [1e-2, 1e-2]


@pytest.mark.parametrize("optim", ["galore_adamw_layerwise", "apollo_adamw_layerwise", "lomo"])
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"fp16": True}])
def test_updates_in_backward_refuse_what_needs_gradients_first(
    tmp_path: Path, optim: str, options: dict[str, Any]
) -> None:
    trainer = make_run(tmp_path, optim, **options)
    with pytest.raises(ConfigError, match="updates as soon as it has a gradient"):
        trainer.train()
    assert trainer.optimizer is None


def test_layerwise_trains_like_the_whole(tmp_path: Path) -> None:
    results = []
    for optim in ("galore_adamw", "galore_adamw_layerwise"):
        trainer = make_run(tmp_path / optim, optim, max_grad_norm=0.0, weight_decay=0.1)
        trainer.train()
        results.append(weights_of(trainer))
    assert differing(*results) == []


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_lomo_is_plain_descent_with_clipping(tmp_path: Path, max_grad_norm: float) -> None:
    runs = []
    for optim in ("lomo", "sgd"):
        trainer = make_run(tmp_path / optim, optim, max_grad_norm=max_grad_norm, save_strategy="no")
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        runs.append((weights_of(trainer), norms))
    for name, weight in runs[0][0].items():
        torch.testing.assert_close(weight, runs[1][0][name])
    assert runs[0][1] == pytest.approx(runs[1][1])
    assert len(runs[0][1]) == (4 if max_grad_norm else 0)


def test_lomo_decays_all_parameters_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="hftrain"):
        trainer = make_run(tmp_path, "lomo", weight_decay=0.1)
        trainer.train()
    assert "decays every parameter" in caplog.text


def test_low_rank_optimizer_without_targets_is_refused_before_launch(tmp_path: Path) -> None:
    trainer = make_run(tmp_path, "galore_adamw", optim_target_modules=None)
    with pytest.raises(ConfigError, match="Set optim_target_modules"):
        trainer.train()


def test_bf16_works_with_updates_in_backward(tmp_path: Path) -> None:
    trainer = make_run(tmp_path, "galore_adamw_layerwise", StopAt(2), bf16=True)
    before = weights_of(trainer)
    trainer.train()
    assert len(differing(weights_of(trainer), before)) == len(before)
