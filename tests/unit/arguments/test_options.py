"""Options of fields with more than one type; the parser is in the interop tests."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from hftrain.arguments.options import flag_or_word, number_or_length, several


def to_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(text)
    return text == "true"


def read(option: Any, kind: Any, words: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", action=option, type=kind)
    return parser.parse_args(["--x", *words]).x


@pytest.mark.parametrize(
    ("option", "kind", "words", "value"),
    [
        (several, str, ["a b"], "a b"),
        (several, str, ["a", "b"], ["a", "b"]),
        (number_or_length, float, ["2"], 2.0),
        (number_or_length, int, ["2"], 2),
        (number_or_length, int, ["2h"], "2h"),
        (flag_or_word, to_bool, ["false"], False),
        (flag_or_word, to_bool, ["all"], "all"),
    ],
)
def test_text_becomes_what_the_field_takes(option: Any, kind: Any, words: list[str], value: Any) -> None:
    found = read(option, kind, words)
    assert (found, type(found)) == (value, type(value))


def test_text_that_is_no_number_is_refused_with_the_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(number_or_length, float, ["often"])
    assert "invalid float value: 'often'" in capsys.readouterr().err
