"""The frame of the tables of usual mistakes: a row makes one, and has one text of its message.

A row's error must say what is wrong and what to do, on one line that fits a screen, without saying a value twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from hftrain import ConfigError
from hftrain.core.errors import HFTrainError
from hftrain.core.log import warn_once

STILTED = ("was asked for", "was given.", "It is no ", "otherwise than", "HINT:", "Traceback (most recent")


class Mistake(NamedTuple):
    """A mistake: `make(folder)` makes it, and the message holds the text `says`, the one that helps."""

    name: str
    make: Callable[[Path], Any]
    says: str
    error: type[BaseException] = ConfigError
    environment: Mapping[str, str | None] = MappingProxyType({})  # None removes a variable


def table(rows: Iterable[Mistake]) -> Any:
    """Return the decorator that calls a test with each row as `mistake`."""
    rows = list(rows)
    assert len({row.name for row in rows}) == len(rows), "two rows have one name"
    return pytest.mark.parametrize("mistake", rows, ids=lambda row: row.name)


def check(mistake: Mistake, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the mistake and check its message: that of the error, or of a warning if `error` is a kind of warning.

    The notes of an error are part of its message, but for the place. A warning must point at the file that made the
    mistake.
    """
    for name, value in mistake.environment.items():
        patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
    patch.chdir(folder)
    if issubclass(mistake.error, Warning):
        warn_once.cache_clear()
        with pytest.warns(mistake.error) as caught:
            mistake.make(folder)
        told = next((each for each in caught if mistake.says in str(each.message)), None)
        assert told is not None, [str(each.message) for each in caught]
        assert told.filename == mistake.make.__code__.co_filename, told.filename
        text = str(told.message)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(mistake.error) as raised:
                mistake.make(folder)
        # What torch says is torch's; the notes are ours.
        notes = getattr(raised.value, "__notes__", [])
        text = " ".join((str(raised.value).replace("\n", " "), *(note for note in notes if not note.startswith("At "))))
    assert mistake.says in text
    assert not [each for each in STILTED if issubclass(mistake.error, HFTrainError) and each in text], text
    assert "\n" not in text.strip(), text
    assert len(text) < 600, text
