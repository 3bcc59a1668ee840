"""Freeze: what trains when, statistics and rates included, and that a resumed run continues exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import assert_same
from support.tiny import Stream, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, Freeze, Trainer, TrainerCallback, layerwise_groups, set_seed


class Deep(nn.Module):
    """A backbone with batch normalization, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.norm(self.backbone(x)))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Watch(TrainerCallback):
    """Note after each update what differs from the update before."""

    def __init__(self) -> None:
        self.changed: list[set[str]] = []
        self.before: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = kwargs["model"].state_dict()
        self.changed.append({name for name, value in now.items() if not torch.equal(value, self.before[name])})


def make(folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Trainer:
    set_seed(3)
    arguments = make_arguments(
        folder,
        **{"max_steps": 12, "learning_rate": 0.01, "weight_decay": 0.1, "per_device_train_batch_size": 8, **options},
    )
    return Trainer(model or Deep(), arguments, train_dataset=make_rows(32), callbacks=list(callbacks))


def is_of(names: set[str], part: str) -> bool:
    return any(name.startswith(part) for name in names)


@pytest.mark.parametrize("until", ["1ep", "4ba", 4, "0.3334dur"])
def test_frozen_modules_keep_every_value_until_they_train(tmp_path: Path, until: Any) -> None:
    watch = Watch()
    trainer = make(tmp_path, Freeze("backbone", until=until), watch)
    trainer.train()
    num = 5 if until == "0.3334dur" else 4
    assert [is_of(names, "backbone") for names in watch.changed] == [step >= num for step in range(12)]
    assert all(is_of(names, "head") for names in watch.changed)
    assert "backbone.1.running_mean" in watch.changed[-1]
    assert "norm.running_mean" in watch.changed[0]
    assert all(p.requires_grad for p in trainer.model.parameters())


def test_schedule_of_several_and_the_longest_wins(tmp_path: Path) -> None:
    watch = Watch()
    make(tmp_path, Freeze({"backbone.[01]": "2ep", "backbone": "1ep", "head.bias": None}), watch).train()
    assert [is_of(names, "backbone.3") for names in watch.changed] == [step >= 4 for step in range(12)]
    assert [is_of(names, "backbone.0") for names in watch.changed] == [step >= 8 for step in range(12)]
    assert [is_of(names, "backbone.1") for names in watch.changed] == [step >= 8 for step in range(12)]
    assert not any(is_of(names, "head.bias") for names in watch.changed)


def test_same_updates_as_freezing_by_hand_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class ByHand(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"].backbone.requires_grad_(state.global_step >= 4)

    def plain() -> Deep:
        set_seed(3)
        model = Deep()
        model.backbone[1], model.norm = nn.LayerNorm(8), nn.Identity()
        return model

    ours = make(tmp_path / "ours", Freeze("backbone", "1ep"), model=plain(), optim="sgd", max_grad_norm=0.0)
    ours.train()
    arguments = transformers.TrainingArguments(
        str(tmp_path / "theirs"), use_cpu=True, report_to=[], max_steps=12, learning_rate=0.01, weight_decay=0.1,
        per_device_train_batch_size=8, optim="sgd", max_grad_norm=0.0, disable_tqdm=True, save_strategy="no",
        seed=ours.args.seed,
    )  # fmt: skip
    model = plain()
    set_seed(3)
    theirs = transformers.Trainer(model, arguments, train_dataset=make_rows(32), callbacks=[ByHand()])
    theirs.train()
    assert_same(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))


def test_names_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'backbone'"):
        make(tmp_path, Freeze("backbon")).train()
    model = Deep()
    model.head.requires_grad_(False)
    with pytest.raises(ConfigError, match="'head' at '1ep'"):
        make(tmp_path, Freeze("head", "1ep"), model=model).train()
    trainer = make(tmp_path, Freeze("head"), model=model, max_steps=1)
    trainer.train()
    assert not model.head.weight.requires_grad  # as it was before
    model = Deep()  # as with adapters, around which all is frozen
    model.backbone[0].requires_grad_(False)
    make(tmp_path, Freeze("backbone", until=1), model=model, max_steps=2).train()
    assert not model.backbone[0].weight.requires_grad


def test_rates_per_layer() -> None:
    model = Deep()
    groups = layerwise_groups(
        model, lr=1.0, rates={"backbone.0": 0.1}, layers=["backbone.*"], decay=0.5, weight_decay=0.2
    )
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in model.named_parameters()}
    assert found["backbone.0.weight"] == (0.1, 0.2)
    assert found["backbone.0.bias"] == (0.1, 0.0)
    assert found["backbone.1.weight"][0] == 0.25
    assert found["backbone.3.weight"][0] == 0.5
    assert found["head.weight"] == (1.0, 0.2)
    assert len(rates) == len(list(model.parameters()))
    with pytest.raises(ConfigError, match="'head'"):
        layerwise_groups(model, lr=1.0, rates={"haed": 0.1})


def test_rates_follow_the_schedule(tmp_path: Path) -> None:
    model = Deep()
    groups = layerwise_groups(model, lr=0.01, rates={"backbone": 0.1})
    trainer = make(tmp_path, model=model)
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"params": groups, "lr": 0.01})
    seen: list[list[float]] = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([group["lr"] for group in kwargs["optimizer"].param_groups])

    trainer.add_callback(Rates())
    trainer.train()
    assert seen[0] == pytest.approx([0.001, 0.001, 0.01, 0.01])
    assert seen[6] == pytest.approx([0.0005, 0.0005, 0.005, 0.005])


def test_passes_of_a_stream_are_refused(tmp_path: Path) -> None:
    """Their number would be known one step too late, and parts of them never."""
    trainer = make(tmp_path, Freeze("backbone", "1ep"))
    trainer.train_dataset = Stream(make_rows(32))
    with pytest.raises(ConfigError, match="has no length"):
        trainer.train()
