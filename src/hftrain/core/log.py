"""The package's logger: quiet by default, one warning per message."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ROOT = "hftrain"
_INSIDE = (ROOT, "torch", "accelerate", "contextlib", "copy", "dataclasses", "functools", "threading")


def get_logger(name: str = ROOT) -> logging.Logger:
    """Return a logger of the package."""
    return logging.getLogger(name)


def set_verbosity(level: int) -> None:
    """Set the level of every logger of the package; adds a stream handler if there is no other handler."""
    root = logging.getLogger(ROOT)
    root.setLevel(level)
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s|%(name)s] %(message)s"))
        root.addHandler(handler)


@contextmanager
def sharing_verbosity(library: str = "transformers") -> Iterator[None]:
    """Use another library's log level, unless the level of this package is set.

    A script that turns on transformers' messages (`set_verbosity_info`) expects those of the run too. The other level
    is used only if it shows more than warnings; its handlers are used if this package has none.
    """
    logger, other = logging.getLogger(ROOT), logging.getLogger(library)
    is_asked = logging.NOTSET < other.level < logging.WARNING
    if not is_asked or logger.level != logging.NOTSET or logger.getEffectiveLevel() <= other.level:
        yield
        return
    handlers = [] if logger.hasHandlers() else list(other.handlers)
    logger.setLevel(other.level)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)
        for handler in handlers:
            logger.removeHandler(handler)


@contextmanager
def refusing_broadcast() -> Iterator[None]:
    """Make torch's warning about a column of labels against a row of outputs, or the reverse, an error."""
    column, row = r"\(torch\.Size\(\[{}, 1\]\)\)", r"\(torch\.Size\(\[{}\]\)\)"
    with warnings.catch_warnings():
        for target, output in ((column, row), (row, column)):
            sizes = target.format(r"([2-9]|\d\d+)"), output.format(r"\1")
            message = f"Using a target size {sizes[0]} that is different to the input size {sizes[1]}"
            warnings.filterwarnings("error", message, UserWarning)
        yield


def get_verbosity() -> int:
    """Return the effective level of the package's loggers."""
    return logging.getLogger(ROOT).getEffectiveLevel()


def passive_level(library: str = "transformers") -> int:
    """Return the level that `log_level="passive"` leaves: this package's if it is set, else another library's."""
    return logging.getLogger(ROOT).level or logging.getLogger(library).level or get_verbosity()


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning the first time a message is seen in this process, unless the log level is above WARNING.

    It points at the user's line: the innermost one outside of this package, torch and wrappers.
    """
    if get_verbosity() > logging.WARNING:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _INSIDE or frame.f_code.co_filename == "<string>"
