from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hftrain.cli.options import HfArg, is_flag, option_settings


def make_field(**options: Any) -> dataclasses.Field[Any]:
    kind = dataclasses.make_dataclass("Kind", [("a_name", Any, HfArg(**options))])
    return dataclasses.fields(kind)[0]


@pytest.mark.parametrize(("hint", "expected"), [(bool, True), (bool | None, True), (bool | str, False), (int, False)])
def test_is_flag_tells_booleans(hint: Any, expected: bool) -> None:
    assert is_flag(hint) is expected


@pytest.mark.parametrize(
    ("hint", "texts"),
    [
        (bool | str | None, {"true": True, "0": False, "all": "all"}),
        (int | bool, {"1": 1, "true": True}),
        (float, {"2": 2.0}),
        (Any, {"x": "x"}),
        (frozenset[int], {"[1, 1]": frozenset({1})}),
    ],
)
def test_text_is_read_as_the_strictest_member_that_fits(hint: Any, texts: dict[str, Any]) -> None:
    read = option_settings(make_field(default=None), hint)["type"]
    assert {text: (read(text), type(read(text))) for text in texts} == {t: (v, type(v)) for t, v in texts.items()}


def test_metadata_wins_over_the_type() -> None:
    settings = option_settings(make_field(default=1, metadata={"type": float, "choices": [1.0, 2.0], "own": 3}), int)
    assert (settings["type"], settings["choices"], settings["default"]) == (float, [1.0, 2.0], 1)
    assert "own" not in settings
