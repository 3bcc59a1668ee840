"""How many runs pairing by seed saves on three small tasks, whose data packages ship; a few minutes on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/compare.py   # needs scikit-learn

Each change is trained with 12 seeds next to its baseline, as `hftrain compare --run` does it. Deviations are those of
the difference in `eval_loss` between two runs: of one seed (paired), or of two (independent). Pairs needed are those at
which the comparison knew, looking after each; not paired is the mean over 11 ways to match runs of different seeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import nn

from hftrain import Trainer, TrainingArguments, set_seed
from hftrain.extras.compare import USUAL, Comparison

Rows = list[dict[str, torch.Tensor]]


class Net(nn.Module):
    """A network and its loss."""

    def __init__(self, net: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss."""
        return {"loss": self.loss(self.net(x), labels)}


def rows_of(x: torch.Tensor, labels: torch.Tensor) -> Rows:
    """Return samples in an order that is the same in all runs."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"x": x[index], "labels": labels[index]} for index in order]


def perceptron(inputs: int, outputs: int, *, width: int = 64, dropout: float = 0.1) -> nn.Module:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, outputs))


class Tiny(nn.Module):
    """A language model of characters: a GRU."""

    def __init__(self, *, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(128, 32), nn.Dropout(dropout)
        self.gru, self.head = nn.GRU(32, width, batch_first=True), nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next characters, shape (batch, 128, length)."""
        logits: torch.Tensor = self.head(self.drop(self.gru(self.embed(x))[0]))
        return logits.transpose(1, 2)


def digits(**shape: Any) -> tuple[Net, Rows]:
    """Tell 1,797 scanned digits apart."""
    data = load_digits()
    rows = rows_of(torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target))
    return Net(perceptron(64, 10, **shape), nn.functional.cross_entropy), rows


def diabetes(**shape: Any) -> tuple[Net, Rows]:
    """Predict the progress of a disease from 10 values, for 442 patients."""
    x, y = (torch.tensor(each, dtype=torch.float32) for each in load_diabetes(return_X_y=True))
    rows = rows_of(x / x.std(0), ((y - y.mean()) / y.std())[:, None])
    return Net(perceptron(10, 1, **shape), nn.functional.mse_loss), rows


def language(**shape: Any) -> tuple[Net, Rows]:
    """Predict the next character of Python's own help texts."""
    text = "".join(topics.values()).encode("ascii", "replace")[: 400 * 65]
    pieces = torch.tensor(list(text)).view(400, 65)
    return Net(Tiny(**shape), nn.functional.cross_entropy), rows_of(pieces[:, :-1], pieces[:, 1:])


TASKS: dict[Callable[..., tuple[Net, Rows]], int] = {digits: 20, diabetes: 20, language: 4}  # and their epochs
CHANGES: dict[str, dict[str, Any]] = {
    "learning rate x 1.1": {"learning_rate": 2.2e-3},
    "learning rate x 2": {"learning_rate": 4e-3},
    "batches of 32, not 16": {"per_device_train_batch_size": 32},
    "dropout 0.2, not 0.1": {"dropout": 0.2},
    "width 96, not 64": {"width": 96},
}


def train(task: Callable[..., tuple[Net, Rows]], seed: int, change: dict[str, Any]) -> float:
    """Return the evaluation loss of a run, on the last fifth of the samples."""
    set_seed(seed)
    net, rows = task(**{name: change[name] for name in ("width", "dropout") if name in change})
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "learning_rate": 2e-3,
        "num_train_epochs": TASKS[task],
    }
    settings |= {name: value for name, value in change.items() if name in settings}
    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, seed=seed, report_to="none", save_strategy="no", logging_strategy="no", **settings
        )
        fifth = len(rows) // 5
        trainer = Trainer(net, args, train_dataset=rows[:-fifth], eval_dataset=rows[-fifth:])
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])


def pairs_needed(one: Sequence[float], two: Sequence[float]) -> int | None:
    """Return after how many pairs a comparison that looks after each knows which is better; None if after none."""
    known = (number for number in range(3, len(one) + 1) if verdict(one[:number], two[:number]) != "not known")
    return next(known, None)


def verdict(one: Sequence[float], two: Sequence[float]) -> str:
    return Comparison(one, two, is_higher_better=False).verdict


def main() -> None:
    """Print a row for each task and change."""
    logging.getLogger("hftrain").setLevel(logging.WARNING)
    print("| task | change | difference | independent | paired | fewer runs | pairs needed | not paired |")
    print("|---|---|---|---|---|---|---|---|")
    for task in TASKS:
        base = [train(task, seed, {}) for seed in range(1, USUAL + 1)]
        for name, change in CHANGES.items():
            other = [train(task, seed, change) for seed in range(1, USUAL + 1)]
            found = Comparison(base, other, is_higher_better=False)
            alone = (stdev(base) ** 2 + stdev(other) ** 2) ** 0.5
            rotated = [pairs_needed(base, [*other[by:], *other[:by]]) for by in range(1, USUAL)]
            apart = f"{fmean(each or USUAL for each in rotated):.1f}" + f" ({rotated.count(None)} not known)" * (
                None in rotated
            )
            size = f"{-found.gain:+.2g} | {alone:.2g} | {found.deviation:.2g} | {(alone / found.deviation) ** 2:.1f} x"
            needed = pairs_needed(base, other) or f"more than {USUAL}"
            print(f"| {task.__name__} | {name} | {size} | {needed} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
