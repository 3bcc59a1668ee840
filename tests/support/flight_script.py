"""A script that trains with a flight log, whose options are kinds of runs and planted faults."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hftrain import EMA, FlightLog, Mixture, SpikeGuard, Trainer, TrainerCallback, TrainingArguments, set_seed

ROWS = torch.randn(60, 9, generator=torch.Generator().manual_seed(0))
# Faults of the machine, which are not there when a step is done again.
STOP_AT, FLIP_AT = (int(os.environ.get(name, -1)) for name in ("STOP_AT", "FLIP_AT"))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--data", default="rows", choices=["rows", "stream", "stateful", "mixture"])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", choices=["bf16", "fp16"])
    parser.add_argument("--strategy")
    parser.add_argument("--averaged", action="store_true")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--corrupted", type=int)
    parser.add_argument("--flip", type=int)
    parser.add_argument("--head-seed", type=int)
    return parser.parse_args()


def augmented(index: int) -> dict[str, torch.Tensor]:
    row = ROWS[index] * (1000 if index == OPTIONS.corrupted else 1)
    return {"x": row[:8] + 0.1 * torch.randn(8), "labels": row[8]}


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, first: int = 0, end: int = 60) -> None:
        self.places = range(first, end)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return augmented(self.places[index])


class Stream(torch.utils.data.IterableDataset[Any]):
    place = 0

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.place < 60:
            self.place += 1
            if self.place % count == number:
                yield augmented(self.place - 1)
        self.place = 0


class Stateful(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(OPTIONS.dropout)) for _ in range(3))
        if OPTIONS.head_seed is not None:
            torch.manual_seed(OPTIONS.head_seed)
        self.head = nn.Linear(8, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += self.training
        for block in self.blocks:
            x = torch.tanh(block(x))
        y = self.head(x).squeeze(1).float()
        if OPTIONS.precision == "fp16" and int(self.steps) % 7 in (3, 4):
            y = y * 1e5  # whose gradient is too large for float16
        return {"loss": (y - labels).square().mean(), "logits": y}


class Faults(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if state.global_step + 1 in (OPTIONS.flip, FLIP_AT):
            model.blocks[1][0].weight.register_hook(flipped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)


def flipped(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient.view(torch.int32)[2, 3] ^= 1 << 20
    return gradient


def dataset() -> Any:
    if OPTIONS.data == "mixture":
        return Mixture({"easy": (Rows(0, 30), {0: 1.0, 10: 0.5}), "hard": (Rows(30, 60), {0: 0.0, 10: 0.5})})
    return {"rows": Rows, "stream": Stream, "stateful": Stateful}[OPTIONS.data]()


def sample_losses(outputs: Any, batch: Any) -> torch.Tensor:
    return (outputs["logits"] - batch["labels"]).square()


def main() -> None:
    set_seed(0)
    args = TrainingArguments(
        OPTIONS.folder, max_steps=OPTIONS.max_steps, per_device_train_batch_size=4, save_steps=6, logging_steps=10,
        report_to="none", disable_tqdm=True, dataloader_num_workers=OPTIONS.workers, learning_rate=1e-2, use_cpu=True,
        bf16=OPTIONS.precision == "bf16", fp16=OPTIONS.precision == "fp16", lr_scheduler_type="constant",
        gradient_accumulation_steps=OPTIONS.accumulation,
    )  # fmt: skip
    callbacks = [Faults(), *([EMA(0.9), SpikeGuard("skip", rolling_interval_length=4)] if OPTIONS.averaged else [])]
    trainer = Trainer(
        Net(), args, train_dataset=dataset(), callbacks=callbacks, strategy=OPTIONS.strategy,
        flight_log=FlightLog(sample_losses=sample_losses),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=OPTIONS.resume)


if __name__ == "__main__":
    OPTIONS = read_options()
    main()
