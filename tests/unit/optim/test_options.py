"""Options as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from hftrain.core.errors import ConfigError
from hftrain.optim.optimizers import cast_options


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("False", bool, False),
        ("yes", bool | None, True),
        (True, bool, True),
        ("None", bool | None, None),
        ("1e-3", float, 1e-3),
        (0.1, float | None, 0.1),
        ("3", int, 3),
        ("3", int | float, 3.0),
        ("std", str, "std"),
    ],
)
def test_cast_options_follows_the_hint(value: Any, hint: Any, expected: Any) -> None:
    cast = cast_options({"key": value}, {"key": hint}, owner="optim='x'")["key"]
    assert cast == expected
    assert type(cast) is type(expected)


@pytest.mark.parametrize(("value", "hint"), [("maybe", bool), ("much", float), ("1.5", int), ("None", float)])
def test_cast_options_refuses_unreadable_values(value: str, hint: Any) -> None:
    with pytest.raises(ConfigError, match=f"key must be {hint.__name__}"):
        cast_options({"key": value}, {"key": hint}, owner="optim='x'")
