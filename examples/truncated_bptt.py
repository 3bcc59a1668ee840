"""Truncated backpropagation through time: an LSTM that learns long series in short pieces.

The optimizer steps after each piece, and the state goes on into the next one without its graph.

python examples/truncated_bptt.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from hftrain import TaskModule, Trainer, TrainingArguments, set_seed


class Forecaster(TaskModule):
    """Predict the next value of a series; `piece` steps are learned at a time."""

    automatic_optimization = False

    def __init__(self, piece: int = 20) -> None:
        super().__init__(nn.ModuleDict({"lstm": nn.LSTM(1, 32, batch_first=True), "out": nn.Linear(32, 1)}))
        self.piece = piece

    def configure_optimizers(self) -> Any:
        return {"all": torch.optim.Adam(self.model.parameters(), lr=1e-2)}

    def run(self, series: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        hidden, state = self.model["lstm"](series[:, :-1], state)
        return mse_loss(self.model["out"](hidden), series[:, 1:]), state

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        series, state, losses = batch["series"], None, []
        for start in range(0, series.shape[1] - 1, self.piece):
            loss, (hidden, cell) = self.run(series[:, start : start + self.piece + 1], state)
            self.optimizers["all"].minimize(loss)
            state = (hidden.detach(), cell.detach())
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.run(batch["series"])[0]


def main() -> None:
    """Train on sine waves of several lengths and phases, and evaluate on others in one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir", default="runs/truncated_bptt")
    options = parser.parse_args()
    set_seed(0)
    phase, rate = 6.3 * torch.rand(260, 1), 0.1 + 0.2 * torch.rand(260, 1)
    data = [{"series": wave[:, None]} for wave in torch.sin(phase + rate * torch.arange(201))]
    args = TrainingArguments(
        options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=20,
        lr_scheduler_type="constant",
        logging_steps=10,
        report_to="none",
    )
    trainer = Trainer(Forecaster(), args, train_dataset=data[:200], eval_dataset=data[200:])
    trainer.train()
    print(f"Variance of the series: 0.50, of the error: {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
