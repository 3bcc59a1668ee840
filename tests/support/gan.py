"""A small GAN whose noise comes from its batch, so that every run of it can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny import make_trainer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from hftrain import StepOutput, TaskModule, Trainer, set_seed


class Half(nn.Sequential):
    """One of the two networks: a class that FSDP can be told to wrap."""


def rows(num: int = 48) -> list[dict[str, torch.Tensor]]:
    numbers = torch.randn(num, 4, generator=torch.Generator().manual_seed(0))
    return [{"real": row[:2] + 1.0, "noise": row[2:]} for row in numbers]


def losses(model: Any, batch: Any) -> tuple[Any, Any]:
    """Return functions that compute the losses of critic and generator."""
    real, noise = batch["real"], batch["noise"]

    def of_critic() -> torch.Tensor:
        real_logits, fake_logits = model["critic"](real), model["critic"](model["generator"](noise).detach())
        return bce(real_logits, torch.ones_like(real_logits)) + bce(fake_logits, torch.zeros_like(fake_logits))

    def of_generator() -> torch.Tensor:
        logits = model["critic"](model["generator"](noise))
        return bce(logits, torch.ones_like(logits))

    return of_critic, of_generator


class Networks(nn.ModuleDict):
    """Has a forward pass, which FSDP asks for; nobody calls it."""

    def forward(self, batch: Any) -> torch.Tensor:
        return self["generator"](batch)


def networks() -> Networks:
    torch.manual_seed(1)
    generator, critic = Half(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), Half(nn.Linear(2, 8), nn.Tanh())
    critic.append(nn.Linear(8, 1))
    return Networks({"generator": generator, "critic": critic})


class Gan(TaskModule):
    """Step the critic, then the generator; or one of them in each step, in turn."""

    automatic_optimization = False

    def __init__(self, takes_turns: bool = False) -> None:
        super().__init__(networks())
        self.takes_turns = takes_turns

    def configure_optimizers(self) -> Any:
        return {name: torch.optim.Adam(net.parameters(), lr=0.02) for name, net in self.model.items()}

    def training_step(self, batch: Any) -> StepOutput:
        of_critic, of_generator = losses(self.model, batch)
        critic, generator = self.optimizers["critic"], self.optimizers["generator"]
        is_critics = critic.num_updates == generator.num_updates
        if not self.takes_turns or is_critics:
            loss = of_critic()
            critic.minimize(loss)
        if not self.takes_turns or not is_critics:
            with generator.toggle():
                loss = of_generator()
                generator.minimize(loss)
        return StepOutput(loss=loss.detach())

    def evaluation_step(self, batch: Any) -> torch.Tensor:
        return losses(self.model, batch)[1]()


def make(folder: Path, task: TaskModule | None = None, **options: Any) -> Trainer:
    set_seed(0)
    options = {"per_device_train_batch_size": 2, "max_steps": 6, "lr_scheduler_type": "constant", **options}
    return make_trainer(folder, Gan() if task is None else task, train_dataset=rows(), **options)


def weights(trainer: Trainer) -> list[list[float]]:
    return [getattr(p, "full_tensor", lambda p=p: p)().flatten().tolist() for p in trainer.model.parameters()]
