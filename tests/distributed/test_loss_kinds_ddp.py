"""Sharded models, and overrides of `compute_loss`, have the losses and gradients of one process.

`test_loss_shares_ddp.py` compares plain models with DDP.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kinds import Divides, Ordered, PerSample, Shifts, Words, batch_of, make_model, make_rows
from support.tiny import make_arguments
from torch.nn.functional import cross_entropy

from hftrain import Trainer, TrainerCallback

pytestmark = pytest.mark.distributed


def documented(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    """Divide by the count, and take DDP's mean back, as the documented `compute_loss` does."""
    outputs = model(**inputs)
    labels = inputs["labels"].flatten()
    loss = cross_entropy(outputs["logits"].flatten(0, 1), labels, reduction="sum") / num_items_in_batch
    if self.args.average_tokens_across_devices:
        loss = loss * self.accelerator.num_processes
    return (loss, outputs) if return_outputs else loss


class Copied(Ordered):
    """A copy of the documented method under a decorator, which leaves none of its names in the code that is called."""

    @functools.wraps(Trainer.compute_loss)
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return documented(self, *args, **kwargs)


class CopiedFromModel(Ordered):
    """A copy of the documented method that changes the model's loss in place."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs["loss"]
        loss *= self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Logs(Ordered):
    """Reads the number of processes and the count, and uses neither."""

    hands_on = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert self.accelerator.num_processes == 2
        assert num_items_in_batch is None or int(num_items_in_batch) > 0
        outputs = model(**inputs, **({"num_items_in_batch": num_items_in_batch} if self.hands_on else {}))
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Hands(Logs):
    """Hands the count on to the model."""

    hands_on = True


class Uncounted(PerSample):
    """Gets no count."""

    accepts_loss_kwargs = False


class Unproved(Divides):
    """Has a part that only divides by the count, so that its value alone tells nothing."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        count = kwargs.get("num_items_in_batch", (labels != -100).sum())
        return super().loss(logits, labels, **kwargs) + logits.square().sum() / count


LOSSES: dict[str, tuple[type[Trainer], type[Words], str]] = {
    "per sample, fsdp": (Ordered, PerSample, "fsdp"),
    "per sample, fsdp1": (Ordered, PerSample, "fsdp1"),
    "shifts, fsdp": (Ordered, Shifts, "fsdp"),
    "shifts, fsdp1": (Ordered, Shifts, "fsdp1"),
    "copied, ddp": (Copied, Words, "ddp"),
}
OVERRIDES: dict[str, tuple[type[Trainer], type[Words]]] = {
    "copied": (Copied, Words),
    "copied from the model": (CopiedFromModel, Unproved),
    "logs": (Logs, Words),
    "logs, without the count": (Logs, Uncounted),
    "hands on": (Hands, Unproved),
}


class Losses(TrainerCallback):
    """Keep the losses of training and evaluations."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
        self.kept += [logs[name] for name in ("loss", "eval_loss") if name in logs]


class Gradients(Losses):
    """Keep the gradient."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept += [number for p in model.parameters() for number in p.grad.flatten().tolist()]


def make_trainer(folder: str, trainer: type[Trainer], model: type[Words], *callbacks: Any, **options: Any) -> Trainer:
    """Return a Trainer that takes a step over all samples, which changes no weight."""
    arguments = make_arguments(
        Path(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, learning_rate=0.0,
        max_grad_norm=0.0, per_device_eval_batch_size=3,
    )  # fmt: skip
    rows = make_rows()
    data = {"train_dataset": rows, "eval_dataset": rows}
    return trainer(make_model(model), arguments, **data, callbacks=list(callbacks), **options)


def losses(folder: str) -> dict[str, list[float]]:
    """Return the losses of a step, and of evaluations before and after."""
    found = {}
    for name, (kind, model, strategy) in LOSSES.items():
        losses = Losses()
        trainer = make_trainer(folder, kind, model, losses, strategy=strategy)
        if model is Shifts:
            trainer.evaluate()  # nothing is known of the loss yet
        trainer.train()
        trainer.evaluate()
        found[name] = losses.kept
        trainer.strategy.close()
    return found


def test_losses_are_those_of_all_samples_in_one_batch(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(losses, folder=str(tmp_path), timeout_s=200)
    assert first == second
    for name, (_, model, _) in LOSSES.items():
        expected = make_model(model)(**batch_of(make_rows()))["loss"].item()
        assert first[name] == pytest.approx([expected] * len(first[name]), rel=1e-5), name
        assert len(first[name]) == 2 + (model is Shifts)


def gradients(folder: str) -> dict[str, list[float]]:
    """Return the gradient of a step by override."""
    found = {}
    for name, kinds in OVERRIDES.items():
        gradients = Gradients()
        trainer = make_trainer(folder, *kinds, gradients)
        trainer.train()
        found[name] = gradients.kept
        trainer.strategy.close()
    return found


def test_overrides_have_the_gradient_of_one_process(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(gradients, folder=str(tmp_path), timeout_s=200)
    assert first == second
    for name, (_, kind) in OVERRIDES.items():
        model = make_model(kind)
        model(**batch_of(make_rows()))["loss"].backward()
        expected = [number for p in model.parameters() for number in p.grad.flatten().tolist()]
        assert first[name] == pytest.approx(expected, rel=1e-6, abs=1e-9), name
