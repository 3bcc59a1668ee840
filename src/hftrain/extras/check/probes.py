"""The small training that the proofs run: by a Trainer, and by a loop of plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import PrinterCallback, TrainerCallback
from hftrain.core.launcher import read_launch
from hftrain.core.seed import set_seed
from hftrain.trainer import Trainer

BATCH, STEPS = 4, 8
_WIDTH, _RATE = 32, 0.1


class Net(nn.Module):
    """A small network that returns its loss, the mean of squared errors."""

    _no_split_modules = ("Linear",)

    def __init__(self, width: int = _WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        inner = (nn.Linear(_WIDTH, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))
        self.layers, self.scale = nn.Sequential(*inner, nn.Linear(width, _WIDTH)), width**-0.5

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch."""
        return {"loss": nn.functional.mse_loss(self.layers(x) * self.scale, labels)}


class TrainingResult(NamedTuple):
    """What a training has come to: the loss of each step, and the weights on the host by name."""

    losses: list[float]
    weights: dict[str, torch.Tensor]

    def distance(self, other: TrainingResult) -> float:
        """Return the largest difference, relative to the largest number of each tensor; NaN if one is."""
        pairs = [(torch.tensor(self.losses), torch.tensor(other.losses))]
        pairs += [(value, other.weights[name]) for name, value in self.weights.items()]
        largest = [expected.double().abs().max().clamp(min=1e-12) for _, expected in pairs]
        distances = [(value.double() - expected.double()).abs().max() for value, expected in pairs]
        return float((torch.stack(distances) / torch.stack(largest)).max())

    def equals(self, other: TrainingResult) -> bool:
        """Tell whether two trainings are equal to the bit."""
        is_same = all(torch.equal(value, other.weights[name]) for name, value in self.weights.items())
        return is_same and self.losses == other.losses


def new_net(**options: Any) -> Net:
    """Return a network with the same weights each time."""
    set_seed(0)
    return Net(**options)


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    """Return the same samples each time."""
    x = torch.randn(number, _WIDTH, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.flip(0)} for row in x]


def batches(device: torch.device, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches of the training on a device."""
    rows = samples(size * STEPS)
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        yield {name: torch.stack([row[name] for row in batch]).to(device) for name in ("x", "labels")}


def make_trainer(folder: Path, *callbacks: TrainerCallback, net: nn.Module | None = None, **options: Any) -> Trainer:
    """Return a Trainer of the small training, whose settings and parts may be changed."""
    parts = {name: options.pop(name) for name in ("strategy", "save_policy", "train_dataset") if name in options}
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "optim": "sgd", "learning_rate": _RATE,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "train_sampling_strategy": "sequential",
        "save_strategy": "no", "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **{**settings, **options})
    parts.setdefault("train_dataset", samples(BATCH * STEPS * read_launch().world_size))
    trainer = Trainer(new_net() if net is None else net, args, callbacks=list(callbacks), **parts)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(folder: Path, **options: Any) -> tuple[Trainer, TrainingResult]:
    """Train, and return the Trainer and its result; of a split model, the weights are left out."""
    resume = options.pop("resume", None)
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {} if trainer.strategy.shards_model else dict(trainer.model.state_dict())
    return trainer, TrainingResult(losses, {name: value.detach().cpu() for name, value in weights.items()})


def train_by_hand(device: torch.device, num_ranks: int, cast: torch.dtype | None = None) -> TrainingResult:
    """Train with a loop of plain torch, in one process on all samples of a step."""
    net, losses = new_net().to(device), []
    optimizer = torch.optim.SGD(net.parameters(), _RATE)
    for batch in batches(device, BATCH * num_ranks):
        with torch.autocast(device.type, dtype=cast, enabled=cast is not None):
            loss = net(**batch)["loss"]
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainingResult(losses, {name: value.detach().cpu() for name, value in net.state_dict().items()})
