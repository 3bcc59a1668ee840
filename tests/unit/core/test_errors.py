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
    suggest,
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


@pytest.mark.parametrize(
    ("parts", "received", "text"),
    [
        (("A.", "B.", "C."), {}, "A. B. C."),
        (("A.", "", "C."), {}, "A. C."),
        (("A.", "B.", "C."), {"x": "1", "y": None}, "A. B. C. Received: x='1', y=None."),
        (("A with x='1'.", "", ""), {"x": "1"}, "A with x='1'."),
        (("A.", "", ""), {"x": "b" * 200}, f"A. Received: x='{'b' * 116}...."),
    ],
)
def test_explain_words_three_parts_and_what_was_received(
    parts: tuple[str, str, str], received: dict[str, object], text: str
) -> None:
    assert explain(*parts, **received) == text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("linaer", "Did you mean 'linear'?"),
        ("LINEAR", "Did you mean 'linear'?"),
        (" co-sine", "Did you mean 'cosine' or 'cosines'?"),
        ("cosine_", "Did you mean 'cosine' or 'cosines'?"),
        ("zzz", "Known names: constant, cosine, cosines, linear."),
        ("", "Known names: constant, cosine, cosines, linear."),
    ],
)
def test_suggest_names_close_matches_else_all(name: str, hint: str) -> None:
    assert suggest(name, iter(["linear", "cosines", "constant", "cosine"])) == hint
