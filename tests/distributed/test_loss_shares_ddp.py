"""Two processes train and evaluate as one with the whole batches does, whatever the loss is a mean over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kinds import (
    NUM_CLASSES,
    Contrasts,
    Divides,
    Marks,
    NeedsCount,
    Ordered,
    PerSample,
    Shifts,
    Words,
    batch_of,
    full_rows,
    make_model,
    make_rows,
)
from support.tiny import Rows, make_arguments

from hftrain import Trainer

pytestmark = pytest.mark.distributed

NUM_STEPS, RATE = 2, 0.05


class Trusts(Ordered):
    """Says that what it takes from the documented method is divided already."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Scaled(Divides):
    """For a loss that is said to be divided."""


class Steps(Ordered):
    """Writes its step out, and takes the loss from the documented method."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Calls(Ordered):
    """Has a step of its own that calls the documented one."""

    def training_step(self, *args: Any) -> torch.Tensor:
        return super().training_step(*args)


class Stepped(NeedsCount):
    """For a step that is written out."""


class Called(NeedsCount):
    """For a step that calls the documented one."""


TRAINERS: dict[Any, type[Trainer]] = {Scaled: Trusts, Stepped: Steps, Called: Calls}


def cut(*lengths: int) -> Rows:
    """Return samples with these numbers of labels at their beginnings; a negative one leaves the first label out."""
    rows = [dict(row) for row in (full_rows() * 2)[: len(lengths)]]
    for row, length in zip(rows, lengths, strict=True):
        row["labels"] = row["labels"].clone()
        row["labels"][abs(length) :] = -100
        if length < 0:
            row["labels"][0] = -100
    return rows


def answers() -> Rows:
    """Return several yes or no answers for each sample."""
    generator = torch.Generator().manual_seed(1)
    return [{**row, "labels": torch.rand(NUM_CLASSES, generator=generator) > 0.6} for row in make_rows()]


# The model, samples, samples per process and batch, micro-batches a step. The first process reads the first of each two
# batches.
CASES: dict[str, tuple[Any, Rows, int, int]] = {
    "booleans": (Marks, answers(), 2, 1),
    "ragged": (PerSample, make_rows(), 2, 1),
    "shifted": (Shifts, make_rows(), 2, 1),
    "divided": (Divides, make_rows(), 2, 1),
    "needs the count": (NeedsCount, make_rows(), 2, 2),
    "needs the count, even everywhere": (NeedsCount, cut(6, 6, 6, 6, 6, 6, 6, 6), 2, 1),
    "one sample each": (Words, cut(6, 2, 6, 2, 5, 4, 3, 2), 1, 2),
    "even in each process": (Words, cut(6, 6, 2, 2, 5, 5, 3, 3), 2, 1),
    "even in the second process": (PerSample, cut(6, 2, 4, 4, 5, 2, 3, 3), 2, 1),
    "even in the first process": (PerSample, cut(4, 4, 6, 2, 3, 3, 5, 2), 2, 1),
    "undecided in one process": (PerSample, cut(6, -6, 3, 3, 6, -6, 2, 2), 2, 1),
    "undecided in both": (PerSample, cut(6, -6, -4, 5, 6, -6, 3, -2), 2, 1),
    "ragged late": (PerSample, cut(6, 6, 6, 6, 6, 6, 6, 2), 2, 1),
    "no label in one process": (Words, cut(6, 2, 0, 0, 5, 3, 6, 6), 2, 1),
    "no label in one process, shifted": (Shifts, cut(0, 0, 6, 2, 5, 3, 6, 6), 2, 1),
    "said to be divided": (Scaled, make_rows(), 2, 2),
    "a step written out": (Stepped, make_rows(), 2, 2),
    "a step that calls the documented one": (Called, make_rows(), 2, 2),
}


def train(folder: str) -> dict[str, list[float]]:
    """Return the weights after two steps of each case."""
    found = {}
    for case, (kind, rows, size, accumulation) in CASES.items():
        arguments = make_arguments(
            Path(folder), per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
            max_steps=NUM_STEPS, learning_rate=RATE, max_grad_norm=0.0, optim="sgd", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = TRAINERS.get(kind, Ordered)(make_model(kind), arguments, train_dataset=rows)
        trainer.train()
        found[case] = torch.cat([p.flatten() for p in trainer.model.parameters()]).tolist()
        trainer.strategy.close()
    return found


def trained(case: str) -> list[float]:
    """Return the weights that a plain loop over whole batches ends with."""
    kind, rows, size, accumulation = CASES[case]
    model, num = make_model(kind), 2 * size * accumulation
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(NUM_STEPS):
        start = step * num % len(rows)
        batch = batch_of(rows[start : start + num])
        count = {"num_items_in_batch": (batch["labels"] != -100).sum()} if issubclass(kind, NeedsCount) else {}
        model(**batch, **count)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.flatten() for p in model.parameters()]).tolist()


def test_weights_are_those_of_one_process_with_the_whole_batch(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(train, folder=str(tmp_path), timeout_s=200)
    assert first == second
    wrong = {case: found for case, found in first.items() if found != pytest.approx(trained(case), rel=1e-6, abs=1e-9)}
    assert not wrong, list(wrong)


# The first process evaluates the first half.
SETS: dict[str, tuple[Any, Rows]] = {
    "labels": (Words, make_rows()),
    "samples": (PerSample, make_rows()),
    "shifted labels": (Shifts, make_rows()),
    "divided": (Divides, make_rows()),
    "needs the count": (NeedsCount, make_rows()),
    "ragged in one process": (PerSample, cut(6, 2, 5, 4, 3, 3, 3, 3)),
    "even in each process": (Words, cut(6, 6, 6, 6, 2, 2, 2, 2)),
    "undecided in one process": (PerSample, cut(6, -6, 6, -6, 3, 3, 3, 3)),
    "undecided differently": (PerSample, cut(6, -6, 6, -6, 5, 5, -2, -3)),
    "contrasts": (Contrasts, make_rows()),
    "no label in one process": (Shifts, cut(6, 2, 5, 3, 0, 0, 0, 0)),
}


def evaluate(folder: str) -> dict[str, float]:
    """Return the loss of each set."""
    found = {}
    for case, (kind, rows) in SETS.items():
        trainer = Trainer(
            make_model(kind), make_arguments(Path(folder), per_device_eval_batch_size=2), eval_dataset=rows
        )
        found[case] = trainer.evaluate()["eval_loss"]
        trainer.strategy.close()
    return found


def test_eval_loss_is_that_of_one_process(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(evaluate, folder=str(tmp_path), timeout_s=200)
    assert first == second
    assert first == pytest.approx(evaluate(str(tmp_path)), rel=1e-9)
    for case, (kind, rows) in SETS.items():
        if kind not in (Contrasts, NeedsCount):
            assert first[case] == pytest.approx(make_model(kind)(**batch_of(rows))["loss"].item(), rel=1e-9), case
