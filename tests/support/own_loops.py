"""Loops as a user writes them: cross-validation, two models in turn, an evaluation that stops when it knows enough."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import Subset

from hftrain import EvaluateLoop, FitLoop, FitParts, StepOutput, TaskModule
from hftrain.loops import EvaluateParts


class KFold(FitLoop):
    """Train `num_folds` times from the same start, each time leaving out another part, on which to evaluate.

    The run's steps are shared out evenly; each part of the run sees the whole schedule.
    """

    unsupported: ClassVar = {
        "auto_find_batch_size": "each fold begins with the weights as they were",
        "engines": "it resets the optimizer",
        "reshaping": "the steps of a fold are counted in batches",
        "sharded_models": "it keeps a copy of all weights",
        "streams": "the samples of a fold are chosen by number",
    }

    def __init__(self, num_folds: int = 5) -> None:
        self.num_folds = num_folds

    def attach(self, parts: FitParts) -> None:
        super().attach(parts)
        self.fold, self.scores = 0, []
        self.start = copy.deepcopy(self._trained())

    def _trained(self) -> dict[str, Any]:
        parts = self.parts
        return {name: getattr(parts, name).state_dict() for name in ("model", "optimizer", "schedule")}

    def run(self, *, has_left: bool = False, ends_epoch: bool = False) -> None:
        whole, progress = self.parts, self.parts.progress
        steps_per_fold = whole.config.max_steps // self.num_folds
        while self.fold < self.num_folds and not whole.control.should_training_stop:
            numbers = range(len(whole.dataset))
            inside = Subset(whole.dataset, [i for i in numbers if i % self.num_folds != self.fold])
            outside = Subset(whole.dataset, [i for i in numbers if i % self.num_folds == self.fold])
            feed = whole.hooks.make_feed(inside)
            config = replace(
                whole.config, max_steps=steps_per_fold * (self.fold + 1), num_epochs=None, num_batches=feed.num_batches
            )
            self.parts = replace(whole, config=config, feed=feed)
            super().run(has_left=has_left, ends_epoch=ends_epoch)
            has_left = ends_epoch = False
            if progress.step < config.max_steps:
                return
            name = f"eval_fold_{self.fold}"
            self.scores.append(whole.hooks.evaluate_on(outside, name)[f"{name}_loss"])
            self.fold += 1
            if self.fold < self.num_folds:
                for part, state in copy.deepcopy(self.start).items():
                    getattr(whole, part).load_state_dict(state)
            # The next fold begins a pass of its own.
            progress.epoch += progress.micro_steps_in_epoch > 0
            progress.micro_steps_in_epoch = 0

    def update(self) -> None:
        super().update()
        for _ in range(self.num_folds - 1):
            self.parts.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {"fold": self.fold, "scores": self.scores, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fold, self.scores, self.start = state["fold"], list(state["scores"]), state["start"]


class Pair(nn.Module):
    """Make samples from noise, and tell made ones from real ones; the second part is the loop's to train."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)

    def forward(self, count: int) -> torch.Tensor:
        return self.maker(torch.randn(count, 2))  # type: ignore[no-any-return]


class Generate(TaskModule):
    """Learn to make samples that the critic takes for real ones."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        verdict = self.model.critic(self.model(len(batch["x"])))
        return nn.functional.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))


class InTurn(FitLoop):
    """Before each step of the run's own optimizer, train the model's critic with a second one."""

    unsupported: ClassVar = {
        "accumulation": "the critic sees one batch per step",
        "auto_find_batch_size": "the critic sees whole batches",
        "engines": "an engine steps one optimizer",
        "loss_scaling": "the critic's loss is not scaled",
        "ranks": "the critic's gradients are not exchanged",
    }

    def __init__(self, learning_rate: float = 1e-2) -> None:
        self.learning_rate = learning_rate

    def attach(self, parts: FitParts) -> None:
        super().attach(parts)
        self.critic = parts.model.critic
        self.optimizer = torch.optim.Adam(self.critic.parameters(), self.learning_rate)

    def run_step(self, window: list[Any], num_items: Any) -> None:
        real = window[0]["x"].to(self.parts.device)
        with torch.no_grad():
            made = self.parts.model(len(real))
        self.critic.requires_grad_(True)
        verdicts, truth = self.critic(torch.cat([real, made])), torch.zeros(2 * len(real), 1, device=real.device)
        truth[: len(real)] = 1.0
        nn.functional.binary_cross_entropy_with_logits(verdicts, truth).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.critic.requires_grad_(False)
        super().run_step(window, num_items)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class UntilCertain(EvaluateLoop):
    """Stop once the accuracy is known to within `margin`, with 95 % confidence."""

    def __init__(self, margin: float = 0.1, at_least: int = 8) -> None:
        self.margin = margin
        self.at_least = at_least

    def attach(self, parts: EvaluateParts) -> None:
        super().attach(parts)
        self.counts = torch.zeros(2, device=parts.group.device)

    def should_stop(self, output: StepOutput | None) -> bool:
        if output is not None:
            is_right = output.outputs.argmax(-1) == output.labels
            self.counts += torch.stack([is_right.sum(), torch.tensor(len(is_right), device=is_right.device)])
        right, seen = self.parts.group.reduce(self.counts.clone(), op="sum").tolist()
        share = right / seen
        return seen >= self.at_least and 1.96 * (share * (1 - share) / seen) ** 0.5 < self.margin
