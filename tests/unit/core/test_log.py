"""The package's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hftrain.core.log import get_logger, get_verbosity, set_verbosity, sharing_verbosity, warn_once


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, whose level and handlers come back afterwards."""
    logger = logging.getLogger("hftrain")
    level, handlers = logger.level, logger.handlers[:]
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def set_application_handlers(monkeypatch: pytest.MonkeyPatch, *handlers: logging.Handler) -> None:
    """Stand in for an application that set up logging, or did not: pytest's own handlers go."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(handlers))


def test_verbosity_reaches_every_logger_of_the_package(logger: logging.Logger) -> None:
    set_verbosity(logging.INFO)
    assert get_verbosity() == logging.INFO
    assert get_logger("hftrain.loops.fit").isEnabledFor(logging.INFO)
    set_verbosity(logging.ERROR)
    assert not get_logger("hftrain.loops.fit").isEnabledFor(logging.WARNING)


def test_handler_is_added_once_where_nothing_prints(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_application_handlers(monkeypatch)
    set_verbosity(logging.INFO)
    set_verbosity(logging.INFO)
    assert len(logger.handlers) == 1
    get_logger("hftrain.x").info("hello")
    assert capsys.readouterr().err == "[INFO|hftrain.x] hello\n"


def test_applications_own_handler_is_left_alone(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    set_application_handlers(monkeypatch, logging.NullHandler())
    set_verbosity(logging.INFO)
    assert logger.handlers == []


def test_message_warns_once() -> None:
    with pytest.warns(FutureWarning, match="^old$"):
        warn_once("old", FutureWarning)
    with pytest.warns(UserWarning, match="^new$"):
        warn_once("new")
    # A second warning would be an error.
    warn_once("old", FutureWarning)
    warn_once("new")


def test_message_is_kept_back_above_the_level_of_warnings(logger: logging.Logger) -> None:
    logger.setLevel(logging.ERROR)
    # The suite turns warnings into errors.
    warn_once("Quiet was asked for.")


def test_warnings_that_another_library_shows_are_not_shown_where_the_script_wants_errors_only() -> None:
    ours, theirs, root = logging.getLogger("hftrain"), logging.getLogger("other_library"), logging.getLogger()
    before = root.level
    try:
        root.setLevel(logging.ERROR)
        theirs.setLevel(logging.WARNING)
        with sharing_verbosity("other_library"):
            assert ours.getEffectiveLevel() == logging.ERROR
        theirs.setLevel(logging.INFO)
        with sharing_verbosity("other_library"):
            assert ours.getEffectiveLevel() == logging.INFO
    finally:
        root.setLevel(before)
        theirs.setLevel(logging.NOTSET)
