"""Two processes train and evaluate as one with the whole batches does, whatever the loss is a mean over."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

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
from torch.nn.functional import cross_entropy

from hftrain import Trainer

pytestmark = pytest.mark.distributed

NUM_STEPS, RATE = 2, 0.05


class Trusts(Ordered):
    """Says that what it takes from the documented method is divided already."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Steps(Ordered):
    """Writes its step out, and takes the loss from the documented method."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Calls(Ordered):
    def training_step(self, *args: Any) -> torch.Tensor:
        return super().training_step(*args)


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

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"]
        loss *= self.accelerator.num_processes
        return loss


class Logs(Ordered):
    hands_on = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None) -> Any:
        assert self.accelerator.num_processes == 2
        assert num_items_in_batch is None or int(num_items_in_batch) > 0
        return model(**inputs, **({"num_items_in_batch": num_items_in_batch} if self.hands_on else {}))["loss"]


class Hands(Logs):
    hands_on = True


class Uncounted(PerSample):
    accepts_loss_kwargs = False


class Unproved(Divides):
    """Has a part that only divides by the count, so that its value alone tells nothing."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        count = kwargs.get("num_items_in_batch", (labels != -100).sum())
        return super().loss(logits, labels, **kwargs) + logits.square().sum() / count


class Case(NamedTuple):
    """A model and its samples, in batches of a size in each process, and so many micro-batches a step."""

    kind: type[Words]
    rows: Rows
    size: int = 2
    accumulation: int = 1
    trainer: type[Trainer] = Ordered
    strategy: str | None = None


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


# The first process reads the first of each two batches.
CASES: dict[str, Case] = {
    "booleans": Case(Marks, answers()),
    "ragged": Case(PerSample, make_rows()),
    "shifted": Case(Shifts, make_rows()),
    "divided": Case(Divides, make_rows()),
    "needs the count": Case(NeedsCount, make_rows(), 2, 2),
    "needs the count, even everywhere": Case(NeedsCount, cut(6, 6, 6, 6, 6, 6, 6, 6)),
    "one sample each": Case(Words, cut(6, 2, 6, 2, 5, 4, 3, 2), 1, 2),
    "even in each process": Case(Words, cut(6, 6, 2, 2, 5, 5, 3, 3)),
    "even in the second process": Case(PerSample, cut(6, 2, 4, 4, 5, 2, 3, 3)),
    "even in the first process": Case(PerSample, cut(4, 4, 6, 2, 3, 3, 5, 2)),
    "as many labels as processes": Case(Words, cut(1, 1, 1, 1, 1, 1, 1, 1)),
    "as many labels as processes, copied": Case(Words, cut(1, 1, 1, 1, 1, 1, 1, 1), 2, 2, CopiedFromModel),
    "undecided in one process": Case(PerSample, cut(6, -6, 3, 3, 6, -6, 2, 2)),
    "undecided in both": Case(PerSample, cut(6, -6, -4, 5, 6, -6, 3, -2)),
    "ragged late": Case(PerSample, cut(6, 6, 6, 6, 6, 6, 6, 2)),
    "no label in one process": Case(Words, cut(6, 2, 0, 0, 5, 3, 6, 6)),
    "no label in one process, shifted": Case(Shifts, cut(0, 0, 6, 2, 5, 3, 6, 6)),
    "said to be divided": Case(Divides, make_rows(), 2, 2, Trusts),
    "a step written out": Case(NeedsCount, make_rows(), 2, 2, Steps),
    "a step that calls the documented one": Case(NeedsCount, make_rows(), 2, 2, Calls),
    "copied": Case(Words, make_rows(), 2, 2, Copied),
    "copied from the model": Case(Unproved, make_rows(), 2, 2, CopiedFromModel),
    "logs": Case(Words, make_rows(), 2, 2, Logs),
    "logs, without the count": Case(Uncounted, make_rows(), 2, 2, Logs),
    "hands on": Case(Unproved, make_rows(), 2, 2, Hands),
    "per sample, fsdp": Case(PerSample, make_rows(), 2, 2, strategy="fsdp"),
    "shifted, fsdp": Case(Shifts, make_rows(), 2, 2, strategy="fsdp"),
}


def train(folder: str) -> dict[str, list[float]]:
    """Return the weights after two steps of each case; where they are split, the main process alone has them."""
    found = {}
    for name, case in CASES.items():
        arguments = make_arguments(
            Path(folder), per_device_train_batch_size=case.size, gradient_accumulation_steps=case.accumulation,
            max_steps=NUM_STEPS, learning_rate=RATE, max_grad_norm=0.0, optim="sgd", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = case.trainer(make_model(case.kind), arguments, train_dataset=case.rows, strategy=case.strategy)
        trainer.train()
        state = trainer.strategy.model_state(trainer.model_wrapped)
        names = [each for each, _ in make_model(case.kind).named_parameters()]
        found[name] = torch.cat([state[each].flatten() for each in names]).tolist() if state else []
        trainer.strategy.close()
    return found


def trained(case: Case) -> list[float]:
    """Return the weights that a plain loop over whole batches ends with."""
    model, num = make_model(case.kind), 2 * case.size * case.accumulation
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(NUM_STEPS):
        start = step * num % len(case.rows)
        batch = batch_of(case.rows[start : start + num])
        count = {"num_items_in_batch": (batch["labels"] != -100).sum()} if case.kind is NeedsCount else {}
        model(**batch, **count)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.flatten() for p in model.parameters()]).tolist()


def test_weights_are_those_of_one_process_with_the_whole_batch(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(train, folder=str(tmp_path))
    assert all(found in (first[name], []) for name, found in second.items())
    wrong = [name for name, case in CASES.items() if first[name] != pytest.approx(trained(case), rel=1e-6, abs=1e-9)]
    assert not wrong


# The first process evaluates the first half.
SETS: dict[str, tuple[Any, Rows] | tuple[Any, Rows, str]] = {
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
    "samples, fsdp": (PerSample, make_rows(), "fsdp"),
    "shifted labels, fsdp": (Shifts, make_rows(), "fsdp"),
}


def evaluate(folder: str, *, is_alone: bool = False) -> dict[str, float]:
    found = {}
    for name, (kind, rows, *strategy) in SETS.items():
        arguments = make_arguments(Path(folder), per_device_eval_batch_size=2)
        strategies = {"strategy": strategy[0]} if strategy and not is_alone else {}
        trainer = Trainer(make_model(kind), arguments, eval_dataset=rows, **strategies)
        found[name] = trainer.evaluate()["eval_loss"]
        trainer.strategy.close()
    return found


def test_eval_loss_is_that_of_one_process(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(evaluate, folder=str(tmp_path))
    assert first == second
    assert first == pytest.approx(evaluate(str(tmp_path), is_alone=True), rel=1e-9)
    for name, (kind, rows, *_) in SETS.items():
        if kind not in (Contrasts, NeedsCount):
            assert first[name] == pytest.approx(make_model(kind)(**batch_of(rows))["loss"].item(), rel=1e-9), name


def proceed(folder: str, *, num_steps: int, size: int = 2) -> list[list[float]]:
    """Train until a step, from the last checkpoint if there is one; return each model's last loss and eval_loss."""
    found = []
    for kind in (Words, PerSample, Divides):
        home = Path(folder) / kind.__name__
        arguments = make_arguments(
            home, per_device_train_batch_size=size, gradient_accumulation_steps=2, max_steps=num_steps,
            save_steps=1, save_strategy="steps", logging_steps=1, per_device_eval_batch_size=1,
        )  # fmt: skip
        trainer = Ordered(make_model(kind), arguments, train_dataset=make_rows(), eval_dataset=make_rows())
        trainer.train(resume_from_checkpoint=home.exists())
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        found.append([losses[-1], trainer.evaluate()["eval_loss"]])
    return found


def test_a_run_of_one_process_continues_on_two(tmp_path: Path, run_distributed: Any) -> None:
    proceed(str(tmp_path / "both"), num_steps=1, size=4)
    expected = proceed(str(tmp_path / "alone"), num_steps=2, size=4)
    for found in run_distributed(proceed, folder=str(tmp_path / "both"), num_steps=2):
        assert found == [pytest.approx(losses, rel=1e-9) for losses in expected]
