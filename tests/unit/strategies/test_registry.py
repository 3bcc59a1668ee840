"""Strategies by name."""

from __future__ import annotations

import pytest

from hftrain.core.errors import ConfigError
from hftrain.strategies.ddp import DDPStrategy
from hftrain.strategies.registry import create_strategy, strategies
from hftrain.strategies.single import SingleDeviceStrategy


@pytest.mark.parametrize(
    ("name", "kind"), [("single", SingleDeviceStrategy), ("ddp", DDPStrategy), ("ddp_find_unused", DDPStrategy)]
)
def test_name_gives_its_strategy(name: str, kind: type) -> None:
    assert type(create_strategy(name, use_cpu=True)) is kind
    assert strategies.summary(name)


@pytest.mark.parametrize(("world_size", "name"), [("1", "single"), ("2", "ddp")])
def test_auto_follows_the_launcher(monkeypatch: pytest.MonkeyPatch, world_size: str, name: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert create_strategy(use_cpu=True).name == name


def test_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Received: bucket_cap_mb=25\."):
        create_strategy("single", use_cpu=True, bucket_cap_mb=25)
