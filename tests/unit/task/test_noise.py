"""NEFTune: how much noise, when, and on what."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.tiny import make_arguments
from torch import nn

from hftrain import TaskModule, Trainer, set_seed
from hftrain.extras.neftune import add_noise, find_embeddings


class Words(nn.Module):
    """Any module with `get_input_embeddings`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 2)
        self.inputs: list[tuple[bool, torch.Tensor]] = []
        self.fails = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        embedded = self.embed(x)
        self.inputs.append((self.training, (embedded - self.embed.weight[x]).detach()))
        if self.fails:
            raise RuntimeError("broken")
        logits = self.head(embedded.mean(1))
        return nn.functional.cross_entropy(logits, labels), logits


ROWS = [{"x": torch.arange(9) % (i + 2), "labels": torch.tensor(i % 2)} for i in range(8)]


make_trainer = partial(
    tiny.make_trainer, neftune_noise_alpha=5.0, num_train_epochs=1, eval_strategy="epoch", train_dataset=ROWS,
    eval_dataset=ROWS,
)  # fmt: skip


def test_noise_is_uniform_of_the_documented_magnitude() -> None:
    embeddings, alpha = nn.Embedding(5, 64), 7.0
    handle = add_noise(embeddings, alpha)
    tokens = torch.randint(5, (50, 30))
    noise = embeddings(tokens) - embeddings.weight[tokens]
    bound = alpha / math.sqrt(30 * 64)
    assert noise.abs().max() <= bound * 1.0001
    assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert noise.mean().abs() < bound / 50
    embeddings.eval()
    assert torch.equal(embeddings(tokens), embeddings.weight[tokens])
    handle.remove()
    embeddings.train()
    assert torch.equal(embeddings(tokens), embeddings.weight[tokens])


@pytest.mark.parametrize("alpha", [0.1, 5.0])
def test_trainer_adds_noise_while_training_only_and_takes_it_away(tmp_path: Path, alpha: float) -> None:
    model = Words()
    forward = model.embed.forward
    trainer = make_trainer(tmp_path, model, neftune_noise_alpha=alpha)
    assert trainer.neftune_noise_alpha == alpha
    assert not model.embed._forward_hooks
    trainer.train()
    bound = alpha / math.sqrt(9 * 16)
    for was_training, noise in model.inputs:
        assert bool(noise.abs().max() > bound / 2) is was_training
        assert noise.abs().max() <= bound * 1.001
    assert {was_training for was_training, _ in model.inputs} == {True, False}
    assert not model.embed._forward_hooks
    assert model.embed.forward == forward


def test_overrides_switch_the_noise(tmp_path: Path) -> None:
    calls = []

    class Own(Trainer):
        def _activate_neftune(self, model: nn.Module) -> nn.Module:
            calls.append("on")
            return super()._activate_neftune(model)

        def _deactivate_neftune(self, model: nn.Module) -> None:
            calls.append("off")
            super()._deactivate_neftune(model)

    arguments = make_arguments(tmp_path, neftune_noise_alpha=1.0, num_train_epochs=1)
    trainer = Own(Words(), arguments, train_dataset=ROWS)
    trainer.train()
    assert calls == ["on", "off"]
    trainer.neftune_noise_alpha = None
    trainer.train()
    assert calls == ["on", "off"]


def test_task_and_adapters_are_looked_into(tmp_path: Path) -> None:
    class WordsTask(TaskModule):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(**batch)[0]

    model = Words()
    make_trainer(tmp_path, WordsTask(model), eval_strategy="no").train()
    assert all(noise.abs().max() > 0 for _, noise in model.inputs)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def get_base_model(self) -> nn.Module:
            return self.base

    assert find_embeddings(Adapted(model)) is model.embed


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_noise_trains_compiled(tmp_path: Path) -> None:
    set_seed(0)
    trainer = make_trainer(tmp_path, Words(), torch_compile_backend="eager", eval_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 2
