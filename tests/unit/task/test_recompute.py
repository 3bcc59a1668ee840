"""Gradient checkpointing, by the model's own method or by layer class."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, Trainer, set_seed
from hftrain.task.recompute import recompute_activations, switch_cache_off


class Block(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + self.dropout(self.linear(x)).tanh()


class Deep(nn.Module):
    """Two blocks and a head, with a transformers-like configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(4, 3)
        self.config = SimpleNamespace(use_cache=True)
        self.caches: list[bool] = []

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        self.caches.append(self.config.use_cache)
        logits = self.head(self.blocks(x))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def train(folder: Path, **options: Any) -> Trainer:
    set_seed(3)
    trainer = Trainer(Deep(), make_arguments(folder, **options), train_dataset=make_rows(8))
    trainer.train()
    return trainer


@pytest.mark.parametrize("classes", [["Block"], [Block], "Block"])
@pytest.mark.parametrize("more", [{}, {"use_reentrant": False, "preserve_rng_state": True}])
def test_layers_of_a_class_are_computed_twice_and_learn_the_same(tmp_path: Path, classes: Any, more: Any) -> None:
    plain = train(tmp_path)
    options = {"layer_classes": classes, **more}
    again = train(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    assert again.model.blocks[0].num_calls == 2 * plain.model.blocks[0].num_calls
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, again)]
    assert losses[0] == losses[1]  # dropout included
    assert again.model.state_dict().keys() == plain.model.state_dict().keys()
    assert "forward" not in vars(again.model.blocks[0])


def test_layers_are_as_they_were_after_an_error(tmp_path: Path) -> None:
    model = Deep()
    arguments = make_arguments(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"layer_classes": ["Block"]}
    )
    rows = [{"x": torch.zeros(5), "labels": torch.tensor(0)}]
    with pytest.raises(RuntimeError):
        Trainer(model, arguments, train_dataset=rows).train()
    assert "forward" not in vars(model.blocks[0])
    assert model.config.use_cache is True


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_json_text_and_compilation_work(tmp_path: Path, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Counting calls is a side effect, which torch does not trace into what it recomputes.
    monkeypatch.setattr(Block, "forward", lambda self, x: x + self.linear(x).tanh())
    trainer = train(
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=json.dumps({"layer_classes": ["Block"]}),
        torch_compile_backend=backend,
    )
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("classes", [["Blok"], ["Block", "Other"], []])
def test_unknown_class_is_refused_with_those_there_are(classes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"has no layer of.*It has: Block, Deep"):
        recompute_activations(Deep(), {"layer_classes": classes})


def test_model_without_the_method_is_told_of_layer_classes() -> None:
    with pytest.raises(ConfigError, match=r"gradient_checkpointing_enable.*layer_classes"):
        recompute_activations(Deep(), None)


def test_cache_is_off_while_training_and_on_in_what_is_saved(tmp_path: Path) -> None:
    saved = []

    class Watch(Trainer):
        def save_model(self, *args: Any, **kwargs: Any) -> None:
            saved.append(self.model.config.use_cache)
            super().save_model(*args, **kwargs)

    model = Deep()
    arguments = make_arguments(
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"layer_classes": ["Block"]},
        save_strategy="epoch",
    )
    Watch(model, arguments, train_dataset=make_rows(8)).train()
    assert set(model.caches) == {False}
    assert saved == [True, True]
    assert model.config.use_cache is True


@pytest.mark.parametrize("value", [None, False])
def test_cache_that_is_off_stays_so(value: Any) -> None:
    model = nn.Module()
    model.config = SimpleNamespace(use_cache=value)
    switch_cache_off(model)()
    assert model.config.use_cache is value
    switch_cache_off(nn.Module())()
