"""The package's logger."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from hftrain.core.log import get_logger, get_verbosity, set_verbosity, warn_once


@pytest.fixture
def bare_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The package's logger where nothing prints, as in a script; pytest's own handlers come back afterwards."""
    logger = logging.getLogger("hftrain")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    yield logger
    logger.setLevel(level)


def test_verbosity_reaches_every_logger_of_the_package(bare_logger: logging.Logger) -> None:
    set_verbosity(logging.INFO)
    assert get_verbosity() == logging.INFO
    assert get_logger("hftrain.loops.fit").isEnabledFor(logging.INFO)
    set_verbosity(logging.ERROR)
    assert not get_logger("hftrain.loops.fit").isEnabledFor(logging.WARNING)


def test_handler_is_added_once_where_nothing_prints(
    bare_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    set_verbosity(logging.INFO)
    set_verbosity(logging.INFO)
    assert len(bare_logger.handlers) == 1
    get_logger("hftrain.x").info("hello")
    assert capsys.readouterr().err == "[INFO|hftrain.x] hello\n"


def test_applications_own_handler_is_left_alone(bare_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    set_verbosity(logging.INFO)
    assert bare_logger.handlers == []


def test_message_warns_once() -> None:
    with pytest.warns(FutureWarning, match="^old$") as caught:
        for _ in range(3):
            warn_once("old", FutureWarning)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="^new$"):
        warn_once("new")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once("new")
