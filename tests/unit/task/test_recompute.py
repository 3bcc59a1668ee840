"""Gradient checkpointing, by the model's own method or by layer class."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import make_arguments, make_rows, make_trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from hftrain import ConfigError, Trainer, set_seed
from hftrain.extras.recompute import recompute_activations


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
@pytest.mark.parametrize("more", [{}, {"use_reentrant": False, "preserve_rng_state": True}, {"use_reentrant": True}])
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
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
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


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"layer_classes": ["Block"]}}],
)
def test_cache_is_off_while_training_and_on_in_what_is_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = []

    class Watch(Trainer):
        def save_model(self, *args: Any, **kwargs: Any) -> None:
            saved.append(self.model.config.use_cache)
            super().save_model(*args, **kwargs)

    model = Deep()
    arguments = make_arguments(tmp_path, save_strategy="epoch", **options)
    trainer = Watch(model, arguments, train_dataset=make_rows(8))
    trainer.train()
    trainer.evaluate(make_rows(2))
    assert set(model.caches) == {False}
    assert saved == [True, True]
    assert model.config.use_cache is True


def test_cache_that_is_asked_for_stays_on(tmp_path: Path) -> None:
    trainer = train(tmp_path, use_cache=True)
    trainer.evaluate(make_rows(2))
    assert set(trainer.model.caches) == {True}


def test_cache_is_off_while_fsdp_recomputes(tmp_path: Path) -> None:
    config = {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": "Block"}
    model = Deep()
    trainer = make_trainer(tmp_path, model, train_dataset=make_rows(8), strategy="fsdp", fsdp_config=config)
    trainer.train()
    trainer.strategy.close()
    assert set(model.caches) == {False}
    assert model.config.use_cache is True


class Adapted(Deep):
    """Frozen embeddings under layers that train, and a method such as transformers' models have."""

    def __init__(self, *, has_embeddings: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.embed.requires_grad_(False)
        self.has_embeddings = has_embeddings
        self.options: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Module:
        if not self.has_embeddings:
            raise NotImplementedError
        return self.embed

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.options = gradient_checkpointing_kwargs or {"use_reentrant": True}  # as transformers 4 has it

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, **self.options) if self.options else block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden), labels)
        return loss, hidden


class Plain(Adapted):
    """The same, with a method that takes no options."""

    def gradient_checkpointing_enable(self) -> None:  # type: ignore[override]
        super().gradient_checkpointing_enable()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Adapted, None), (Adapted, {"use_reentrant": True}), (Adapted, {"use_reentrant": False}), (Plain, None)],
)
def test_layers_above_frozen_embeddings_train(tmp_path: Path, kind: type[Adapted], options: Any) -> None:
    assert not recomputed(tmp_path, kind, options).embed._forward_hooks


def recomputed(folder: Path, kind: Any, options: Any) -> Any:
    """Train with recomputed layers, and return the model, which is the same as without."""
    models = []
    for settings in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}):
        set_seed(3)
        models.append(kind())
        Trainer(models[-1], make_arguments(folder, **settings), train_dataset=make_rows(8)).train()
    plain, again = models
    assert again.blocks[0].num_calls == 2 * plain.blocks[0].num_calls
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    return again


def test_reentrant_checkpoint_of_a_model_without_known_embeddings_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="Set use_reentrant=False"):
        recompute_activations(Adapted(has_embeddings=False), {"use_reentrant": True})


class Keyword(Deep):
    """A model that hands its layers their input by name."""

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        for block in self.blocks:
            x = block(x=x)
        return nn.functional.cross_entropy(self.head(x), labels), x


def test_reentrant_layers_take_their_inputs_by_name(tmp_path: Path) -> None:
    recomputed(tmp_path, Keyword, {"layer_classes": ["Block"], "use_reentrant": True})
