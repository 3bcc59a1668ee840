"""The cache of keys and values, which only generation needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hftrain.evaluation.preparation import switch_cache_off


@pytest.mark.parametrize("value", [None, False])
def test_cache_that_is_off_stays_so(value: Any) -> None:
    model = nn.Module()
    model.config = SimpleNamespace(use_cache=value)
    assert switch_cache_off(model) is None
    assert model.config.use_cache is value
    assert switch_cache_off(nn.Module()) is None


def test_cache_is_off_in_every_configuration_of_a_composed_model() -> None:
    model = nn.ModuleDict({"blocks": nn.Linear(1, 1)})
    model.config = SimpleNamespace(use_cache=True)
    model["blocks"].config = SimpleNamespace(use_cache=True)
    put_back = switch_cache_off(model)
    assert not model.config.use_cache
    assert not model["blocks"].config.use_cache
    assert put_back is not None
    put_back()
    assert model["blocks"].config.use_cache is True
