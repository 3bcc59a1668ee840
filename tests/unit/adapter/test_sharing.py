"""What `accelerator_config` says beside how loaders are shared."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer
from hftrain.adapter.data import non_blocking_copies, resolve_sharing, syncs_each_batch, total_batch_size
from hftrain.rules.strategy import check_configured_state


@dataclass
class Config:
    """Settings as an object, as transformers' `AcceleratorConfig` is."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = field(default_factory=lambda: {"num_steps": 3})
    use_configured_state: bool = False


def with_accumulation(**options: Any) -> dict[str, Any]:
    return {"gradient_accumulation_kwargs": options}


@pytest.mark.parametrize("form", ["dict", "object", "path"])
def test_number_of_accumulation_steps_acts_in_every_form(tmp_path: Path, form: str) -> None:
    path = tmp_path / "sharing.json"
    path.write_text(json.dumps(with_accumulation(num_steps=3)), encoding="utf-8")
    config: Any = {"dict": with_accumulation(num_steps=3), "object": Config(), "path": str(path)}[form]
    arguments = make_arguments(tmp_path, accelerator_config=config, num_train_epochs=1)
    trainer = Trainer(Net(), arguments, train_dataset=make_rows(22))
    assert trainer.train().global_step == 2
    assert Trainer(Net(), arguments, train_dataset=make_rows(22)).args.gradient_accumulation_steps == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"non_blocking": 1}, "neither true nor false"),
        ({"dispatch_batches": "yes"}, "neither true, false nor null"),
        ({"gradient_accumulation_kwargs": [1]}, "not a mapping"),
        (with_accumulation(num_step=3), "Did you mean 'num_steps'"),
        (with_accumulation(num_steps=0), "counts micro-batches"),
        (with_accumulation(adjust_scheduler=False), "counts optimizer updates"),
        (with_accumulation(sync_with_dataloader=False), "next epoch"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(Net(), make_arguments(tmp_path, accelerator_config=config))


@pytest.mark.parametrize("config", [with_accumulation(num_steps=3), Config()], ids=type)
def test_two_numbers_of_accumulation_steps_are_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 differs from it"):
        resolve_sharing(make_arguments(tmp_path, accelerator_config=config, gradient_accumulation_steps=2))


def test_class_in_place_of_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Give Config\(\)"):
        make_arguments(tmp_path, accelerator_config=Config)


def test_gradients_are_exchanged_at_each_batch_where_asked_for(tmp_path: Path) -> None:
    entered: list[Any] = []
    for config in (None, with_accumulation(sync_each_batch=True)):
        arguments = make_arguments(tmp_path, accelerator_config=config, gradient_accumulation_steps=2, max_steps=1)
        trainer = Trainer(Net(), arguments, train_dataset=make_rows(8))
        original = trainer.strategy.no_sync
        trainer.strategy.no_sync = lambda model, original=original: entered.append(1) or original(model)  # type: ignore[assignment, method-assign, misc]
        trainer.train()
        assert syncs_each_batch(arguments) == (config is not None)
    assert entered == [1]


@pytest.mark.parametrize(("config", "expected"), [({}, None), ({"non_blocking": True}, True), (Config(), False)])
def test_copies_wait_or_not_as_asked(tmp_path: Path, config: Any, expected: bool | None) -> None:
    arguments = make_arguments(tmp_path, accelerator_config=config)
    trainer = Trainer(Net(), arguments)
    trainer.strategy.launch()
    assert non_blocking_copies(arguments) is trainer.strategy.non_blocking is expected
    assert trainer.strategy._move.keywords["non_blocking"] is bool(expected)  # type: ignore[attr-defined]


def test_configured_state_is_needed_and_used(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, accelerator_config={"use_configured_state": True})
    with pytest.raises(ConfigError, match="no initialized state"):
        Trainer(Net(), arguments)
    PartialState(cpu=True)
    Trainer(Net(), arguments, train_dataset=make_rows(8)).train()
    with pytest.raises(ConfigError, match="on cpu, and the strategy on cuda"):
        check_configured_state(arguments, torch.device("cuda"))


def test_samples_of_an_update_are_counted_as_they_are_shared(tmp_path: Path) -> None:
    for config, expected in (({}, 24), ({"split_batches": True}, 12)):
        arguments = make_arguments(tmp_path, accelerator_config=config, gradient_accumulation_steps=3)
        assert total_batch_size(arguments, world_size=2) == expected
