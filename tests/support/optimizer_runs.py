"""Runs of a small model with embeddings and linear layers, large enough for what optimizers do to large tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny import make_arguments
from torch import nn

from hftrain import Trainer, TrainerCallback, set_seed

Rows = list[dict[str, torch.Tensor]]


class Block(nn.Module):
    """Two linear modules with names that low-rank optimizers are asked for, and a norm beside them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attn = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.Linear(2 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x + self.attn(x)))


class Words(nn.Module):
    """Classify sequences of tokens; by the documented rules."""

    def __init__(self, size: int = 64, vocabulary: int = 80) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.block = Block(size)
        self.head = nn.Linear(size, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.block(self.embed(input_ids)).mean(1))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def make_words(num: int = 24, seed: int = 1) -> Rows:
    """Return samples of {"input_ids": 5 tokens, "labels": class 0, 1 or 2}."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(0, 80, (5,), generator=generator),
            "labels": torch.randint(0, 3, (), generator=generator),
        }
        for _ in range(num)
    ]


def make_run(folder: Path, optim: str, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """Return a Trainer of `Words` for 4 steps that saves every 2."""
    set_seed(1)
    defaults = {"optim": optim, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    if optim.startswith(("galore", "apollo")):
        defaults.update(optim_target_modules=["attn", "mlp"], optim_args="rank=4, update_proj_gap=3")
    if optim.startswith("schedule_free"):
        defaults.update(lr_scheduler_type="constant")
    return Trainer(
        Words(),
        make_arguments(folder, **{**defaults, **options}),
        train_dataset=make_words(),
        eval_dataset=make_words(8, seed=2),
        callbacks=list(callbacks),
    )


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of the weights."""
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
