"""Errors: their classes and their wording."""

from __future__ import annotations

import pickle

import pytest

from hftrain.core.errors import (
    CheckpointError,
    ConfigError,
    HFTrainError,
    MissingDependencyError,
    StrategyError,
    TaskError,
    explain,
)

KINDS = [
    (ConfigError, ValueError),
    (MissingDependencyError, ImportError),
    (StrategyError, RuntimeError),
    (CheckpointError, RuntimeError),
    (TaskError, TypeError),
]


@pytest.mark.parametrize(("kind", "builtin"), KINDS)
def test_error_is_caught_under_either_name(kind: type[HFTrainError], builtin: type[Exception]) -> None:
    for name in (kind, builtin, HFTrainError):
        with pytest.raises(name, match="asked"):
            raise kind("asked")


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS])
def test_error_survives_pickling(kind: type[HFTrainError]) -> None:
    error = kind("Cannot use A.", "It cannot be.", "Use B.", a=1)
    assert str(error) == explain("Cannot use A.", "It cannot be.", "Use B.", a=1)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
