"""Processes agree on what a model's loss is a mean over, and weigh by it, in training and in evaluation."""

from __future__ import annotations

import logging
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


class Breaks(Plain):
    """Raises in its second layer for a marked sample alone, which the search tries and training does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        x = self.first(x) + 0 * x
        if len(x) == 1 and not self.training and (labels == 6).any():
            raise ValueError("a marked sample")
        return super().forward(x, labels)


def broken(folder: str, *, strategy: str) -> dict[str, Any]:
    """Train where one process's samples cannot be tried, and return what was said, and whether it was trained."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("hftrain").addHandler(Ear(logging.WARNING))
    rows = make_rows()
    for row in rows:
        row["labels"][row["labels"] == 6] = 5
    rows[0]["labels"][0] = rows[1]["labels"][0] = 6
    set_seed(0)
    arguments = make_arguments(Path(folder), per_device_train_batch_size=2, max_steps=2, per_device_eval_batch_size=2)
    trainer = Ordered(Breaks(), arguments, train_dataset=rows, eval_dataset=rows, strategy=strategy)
    trainer.evaluate()
    steps = trainer.train().global_step
    return {"steps": steps, "said": [text for text in said if "Cannot determine" in text]}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_error_of_one_process_in_the_search_stops_nobody(
    tmp_path: Path, run_distributed: Any, strategy: str
) -> None:
    first, second = run_distributed(broken, folder=str(tmp_path), strategy=strategy, timeout_s=60)
    assert (first["steps"], second) == (2, {"steps": 2, "said": []})
    assert len(first["said"]) == 1
    assert "of Breaks is a mean over: ValueError: a marked sample. It is assumed" in first["said"][0]
