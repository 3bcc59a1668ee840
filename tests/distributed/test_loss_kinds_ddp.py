"""Processes agree on what a model's loss is a mean over, and weigh by it, in training and in evaluation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Rows, make_arguments
from torch import nn
from torch.nn.functional import cross_entropy

from hftrain import Trainer, TrainerCallback, set_seed

pytestmark = pytest.mark.distributed

NUM_CLASSES, LENGTH, NUM_ROWS = 7, 6, 8


class PerSample(nn.Module):
    """The mean over samples of each one's own mean, as CTC has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, NUM_CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        each = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
        return {"loss": (each / (labels != -100).sum(1).clamp(min=1)).mean(), "logits": logits}


class Shifts(PerSample):
    """Predicts the next label, which its name does not tell; takes the count and ignores it."""

    accepts_loss_kwargs = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class Plain(PerSample):
    """The mean over labels."""

    accepts_loss_kwargs = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


KINDS = {"per sample": PerSample, "shifts": Shifts, "scales": Plain}
STRATEGIES = ("ddp", "fsdp", "fsdp1")


def make_rows() -> Rows:
    """Return sequences of which only the first two have unequal numbers of labels: one process sees no others."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(NUM_ROWS):
        labels = torch.randint(0, NUM_CLASSES, (LENGTH,), generator=generator)
        labels[2 + 3 * (index == 1) :] = -100
        rows.append({"x": 3 * torch.randn(LENGTH, 3, generator=generator), "labels": labels})
    return rows


def make_model(name: str) -> nn.Module:
    set_seed(0)
    return KINDS[name]()


class Ordered(Trainer):
    """Trains in the order of the data."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Scales(Ordered):
    """Divides by the count, and takes DDP's mean back, as the documented `compute_loss` does."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        labels = inputs["labels"].flatten()
        loss = cross_entropy(outputs["logits"].flatten(0, 1), labels, reduction="sum") / num_items_in_batch
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def losses(folder: str) -> dict[str, list[float]]:
    """Return, by kind and strategy, the loss of a step over all samples, and those of evaluations before and after."""
    found: dict[str, list[float]] = {}
    for name in KINDS:
        for strategy in STRATEGIES if name != "scales" else ("ddp",):
            arguments = make_arguments(
                Path(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1,
                learning_rate=0.0, per_device_eval_batch_size=3,
            )  # fmt: skip
            logged: list[float] = []

            class Keep(TrainerCallback):
                def on_log(self, *args: Any, logs: Any = None, logged: Any = logged, **kwargs: Any) -> None:
                    logged += [logs[key] for key in ("loss", "eval_loss") if key in logs]

            rows = make_rows()
            kind = Scales if name == "scales" else Ordered
            trainer = kind(
                make_model(name), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[Keep], strategy=strategy
            )
            if name == "shifts":
                trainer.evaluate()
            trainer.train()
            trainer.evaluate()
            found[f"{name} {strategy}"] = logged
            trainer.strategy.close()
    return found


def test_losses_are_those_of_all_samples_in_one_batch(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(losses, folder=str(tmp_path), timeout_s=200)
    assert first == second
    batch = {name: torch.stack([row[name] for row in make_rows()]) for name in ("x", "labels")}
    for case, found in first.items():
        expected = make_model(case.rpartition(" ")[0])(**batch)["loss"].item()
        assert found == pytest.approx([expected] * len(found), rel=1e-5), case
        assert len(found) == 2 + case.startswith("shifts")


class Copied(Ordered):
    """A copy of the documented method under a decorator, which leaves none of its names in the code that is called."""

    @functools.wraps(Trainer.compute_loss)
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return documented(self, *args, **kwargs)


def documented(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    outputs = model(**inputs)
    labels = inputs["labels"].flatten()
    loss = cross_entropy(outputs["logits"].flatten(0, 1), labels, reduction="sum") / num_items_in_batch
    if self.args.average_tokens_across_devices:
        loss = loss * self.accelerator.num_processes
    return (loss, outputs) if return_outputs else loss


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

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert self.accelerator.num_processes == 2
        assert num_items_in_batch is None or int(num_items_in_batch) > 0
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Hands(Ordered):
    """Hands the count on to the model, and logs the number of processes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert self.accelerator.num_processes == 2
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Divides(Plain):
    """The mean over labels, and a part that only divides by the count, so that its value alone tells nothing."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") + logits.square().sum()
        return {"loss": total / kwargs.get("num_items_in_batch", (labels != -100).sum()), "logits": logits}


OVERRIDES: dict[str, tuple[type[Trainer], type[nn.Module]]] = {
    "copied": (Copied, Plain),
    "copied from the model": (CopiedFromModel, Divides),
    "logs": (Logs, Plain),
    "logs, without the count": (Logs, PerSample),
    "hands on": (Hands, Divides),
}


def gradients(folder: str) -> dict[str, list[float]]:
    """Return the gradient of a step over all samples, by override."""
    found = {}
    for name, (kind, model) in OVERRIDES.items():
        arguments = make_arguments(
            Path(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1,
            learning_rate=0.0, max_grad_norm=0.0,
        )  # fmt: skip
        kept: list[float] = []

        class Keep(TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, model: Any = None, kept: Any = kept, **kwargs: Any) -> None:
                kept += [number for p in model.parameters() for number in p.grad.flatten().tolist()]

        set_seed(0)
        trainer = kind(model(), arguments, train_dataset=make_rows(), callbacks=[Keep])
        trainer.train()
        found[name] = kept
        trainer.strategy.close()
    return found


def test_overrides_have_the_gradient_of_one_process(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(gradients, folder=str(tmp_path), timeout_s=200)
    assert first == second
    batch = {name: torch.stack([row[name] for row in make_rows()]) for name in ("x", "labels")}
    for name, (_, kind) in OVERRIDES.items():
        set_seed(0)
        model = kind()
        model(**batch)["loss"].backward()
        expected = [number for p in model.parameters() for number in p.grad.flatten().tolist()]
        assert first[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
