"""Tiny tasks, models and data that train in milliseconds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hftrain import StepOutput, TaskModule, Trainer, TrainerCallback, TrainingArguments, set_seed
from hftrain.core.types import Owns
from hftrain.strategies import SingleDeviceStrategy, Strategy
from hftrain.strategies.registry import create_strategy

Rows = list[dict[str, torch.Tensor]]
PARTS = inspect.signature(Trainer.__init__).parameters.keys()
# How two processes hold and save a model.
SHARINGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "fsdp_whole": {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
}


class Net(nn.Module):
    """A plain module by the documented rules: loss first when labels are given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits = self.layers(x)
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Task(TaskModule):
    """The same network as a task."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(Net(dropout))

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(**batch)
        return StepOutput(loss=loss, outputs=logits, labels=batch["labels"])


class StepEngine(SingleDeviceStrategy):
    """An engine that updates the weights itself."""

    owns = Owns.STEP

    def step(self) -> bool:
        return True


class MapRows(Dataset[dict[str, torch.Tensor]]):
    """Map-style data that remembers which samples were read."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.read = rows, list[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return self.rows[index]


class Noisy(MapRows):
    """Samples that draw a random number each time they are read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {**row, "x": row["x"] + 0.1 * torch.randn(4)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same samples without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Reading(Trainer):
    """Keeps the first numbers of the samples that this process trains on, by step."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        vars(self).setdefault("seen", []).append(inputs["x"][:, 0].tolist())
        return super().training_step(model, inputs, *args)


def make_rows(num: int = 22, seed: int = 1) -> Rows:
    """Return samples of {"x": 4 floats, "labels": class 0, 1 or 2}."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randint(0, 3, (), generator=generator)}
        for _ in range(num)
    ]


def make_data(num: int = 22, seed: int = 1) -> dict[str, Any]:
    """Return the parts of a Trainer that a configuration names as its data.

    Args:
        num: How many samples.
        seed: Of their numbers.
    """
    return {"train_dataset": make_rows(num, seed)}


def at(event: str, function: Any) -> TrainerCallback:
    """Return a callback that calls a function at one event."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return type("At", (TrainerCallback,), {event: call})()  # type: ignore[no-any-return]


def make_texts() -> Rows:
    """Return samples of twelve tokens with different numbers of labels."""
    generator, found = torch.Generator().manual_seed(3), []
    for number in range(24):
        tokens = torch.randint(3, 64, (12,), generator=generator)
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(12) < number % 9, -100)})
    return found


def share(prediction: Any) -> dict[str, float]:
    """Compute the share of right predictions, as a `compute_metrics`."""
    return {"share": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_arguments(folder: Path, *, arguments: Any = TrainingArguments, **options: Any) -> Any:
    """Return arguments, of a class, for a silent run that logs every step and saves nothing."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        **({} if "max_steps" in options else {"num_train_epochs": 2}),
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
    }
    return arguments(str(folder), **{**defaults, **options})


def make_trainer(folder: Path, model: Any = None, *callbacks: Any, kind: Any = Trainer, **options: Any) -> Any:
    """Return a silent Trainer, of the tiny network and its samples unless others are given.

    Args:
        folder: Where it writes.
        model: A network or task; left out with `model_init`.
        callbacks: Its callbacks.
        kind: The class.
        options: Parts of a Trainer by its own names; all others are settings, as in `make_arguments`.
    """
    parts = {name: options.pop(name) for name in PARTS & options.keys()}
    parts = {"train_dataset": make_rows(), "callbacks": list(callbacks), **parts}
    model = Net() if model is None and "model_init" not in parts else model
    return kind(model, make_arguments(folder, **options), **parts)


def on_tensor_ranks(**options: Any) -> Strategy:
    """Return a strategy by which all processes share the layers of `Net`."""
    plan = {"layers.0": "colwise_gather_output", "layers.4": "rowwise_split_input"}
    return create_strategy("tp", use_cpu=True, plan=plan, **options)


def train(folder: Path, model: Any = None, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    """Make a Trainer, train it, and return it."""
    trainer = make_trainer(folder, model, *callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make_resumable(folder: Path, *callbacks: Any, seed: int = 1, model: Any = None, **options: Any) -> Any:
    """Return a seeded Trainer of the network with dropout, which saves where a callback says so and at the end."""
    set_seed(seed)
    defaults = {"save_strategy": "steps", "save_steps": 100, "eval_dataset": make_rows(7, seed=2)}
    model = Net(dropout=0.2) if model is None else model
    return make_trainer(folder, model, *callbacks, **{**defaults, **options})
