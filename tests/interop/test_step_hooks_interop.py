"""Hooks of the training step, overridden as the documentation shows them, do what they do in transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import collate, make_model, make_rows, run_options  # noqa: E402
from support.resuming import without_times  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]

LIBRARIES = (hftrain, transformers)


def train_both(folder: Path, subclass: Any, *, dropout: float = 0.0, **options: Any) -> list[Any]:
    """Train the same classifier with a subclass of each library's Trainer, made by ``subclass(library)``."""
    trainers = []
    for library in LIBRARIES:
        where = folder / library.__name__
        model = make_model("bert", dropout=dropout)
        arguments = library.TrainingArguments(str(where), **run_options(**options))
        trainer = subclass(library)(
            model, arguments, train_dataset=make_rows("bert"), eval_dataset=make_rows("bert", 6), data_collator=collate
        )
        trainer.train()
        trainers.append(trainer)
    return trainers


def assert_same(trainers: list[Any], *, rel: float = 1e-5) -> None:
    """Compare log histories (without what is measured by the clock) and weights."""
    ours, theirs = trainers
    mine, others = (without_times(trainer.state.log_history) for trainer in trainers)
    assert [entry.keys() for entry in mine] == [entry.keys() for entry in others]
    for entry, other in zip(mine, others, strict=True):
        assert entry == pytest.approx(other, rel=rel)
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divides_by", ["nothing", "arguments", "window"])
@pytest.mark.parametrize("bf16", [False, True])
def test_backward_of_the_accelerator_in_an_overridden_training_step(
    tmp_path: Path, divides_by: str, bf16: bool
) -> None:
    def subclass(library: Any) -> Any:
        class ByHand(library.Trainer):
            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
                model.train()
                inputs = self._prepare_inputs(inputs)
                seen[library].append(self.accelerator.sync_gradients)
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, inputs)
                if divides_by == "arguments":
                    loss = loss / self.args.gradient_accumulation_steps
                elif divides_by == "window":
                    loss = loss / self.current_gradient_accumulation_steps
                self.accelerator.backward(loss)
                return loss.detach()

        return ByHand

    seen: dict[Any, list[bool]] = {library: [] for library in LIBRARIES}
    assert_same(
        train_both(tmp_path, subclass, gradient_accumulation_steps=4, bf16=bf16, max_grad_norm=0.5),
        rel=5e-3 if bf16 else 1e-5,
    )
    # 6 batches an epoch: a window of 4, and one of 2.
    assert seen[hftrain] == seen[transformers] == [False, False, False, True, False, True] * 2


def logging_itself(library: Any) -> Any:
    """Override `_maybe_log_save_evaluate` without the base method, as the documented one is written."""

    class Own(library.Trainer):
        def _maybe_log_save_evaluate(
            self,
            tr_loss: Any,
            grad_norm: Any,
            model: Any,
            trial: Any,
            epoch: Any,
            ignore_keys_for_eval: Any,
            start_time: Any,
            learning_rate: Any = None,
        ) -> None:
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                total = tr_loss.mean().item()
                tr_loss -= tr_loss
                logs = {"loss": total / (self.state.global_step - self._globalstep_last_logged)}
                logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
                logs["learning_rate"] = learning_rate if learning_rate is not None else self._get_learning_rate()
                self._total_loss_scalar += total
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(logs, start_time)
            if self.control.should_evaluate:
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                is_best = self._determine_best_metric(metrics=metrics, trial=trial)
                if self.args.save_strategy == "best":
                    self.control.should_save = is_best
            if self.control.should_save:
                self._save_checkpoint(model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    return Own


def logging_twice_the_loss(library: Any) -> Any:
    """Hand another loss to the base method."""

    class Twice(library.Trainer):
        def _maybe_log_save_evaluate(self, tr_loss: Any, *rest: Any, **keywords: Any) -> None:
            super()._maybe_log_save_evaluate(tr_loss.mul_(2), *rest, **keywords)

    return Twice


@pytest.mark.parametrize("subclass", [logging_itself, logging_twice_the_loss])
@pytest.mark.parametrize(
    "options",
    [
        {"logging_steps": 5},
        {"logging_steps": 3, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_first_step": True},
        {"logging_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 6, "save_strategy": "best"},
        {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4},
    ],
)
def test_overridden_end_of_a_step_logs_evaluates_and_saves_the_same(
    tmp_path: Path, subclass: Any, options: dict[str, Any]
) -> None:
    best = {"metric_for_best_model": "loss", "greater_is_better": False}
    trainers = train_both(tmp_path, subclass, **options, **best)
    assert_same(trainers)
    ours, theirs = (sorted(path.name for path in (tmp_path / each.__name__).glob("checkpoint-*")) for each in LIBRARIES)
    assert ours == theirs
    ours, theirs = (trainer.state.best_metric for trainer in trainers)
    assert ours == (theirs if theirs is None else pytest.approx(theirs, rel=1e-5))
