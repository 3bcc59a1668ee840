"""The package's logger: quiet by default, one warning per message."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

ROOT = "hftrain"


def get_logger(name: str = ROOT) -> logging.Logger:
    """Return a logger of the package."""
    return logging.getLogger(name)


def set_verbosity(level: int) -> None:
    """Set the level of every logger of the package; a stream handler is added if nothing else would print."""
    root = logging.getLogger(ROOT)
    root.setLevel(level)
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s|%(name)s] %(message)s"))
        root.addHandler(handler)


@contextmanager
def sharing_verbosity(library: str = "transformers") -> Iterator[None]:
    """Log as much as another library was told to, where nobody said how much this package logs.

    A script that asks transformers for its messages (`set_verbosity_info`) means those of the run too. What it asked
    for counts if it is more than warnings; the library's handlers show the messages if nothing else would.
    """
    ours, theirs = logging.getLogger(ROOT), logging.getLogger(library)
    is_asked = logging.NOTSET < theirs.level < logging.WARNING
    if not is_asked or ours.level != logging.NOTSET or ours.getEffectiveLevel() <= theirs.level:
        yield
        return
    handlers = [] if ours.hasHandlers() else list(theirs.handlers)
    ours.setLevel(theirs.level)
    for handler in handlers:
        ours.addHandler(handler)
    try:
        yield
    finally:
        ours.setLevel(logging.NOTSET)
        for handler in handlers:
            ours.removeHandler(handler)


def get_verbosity() -> int:
    """Return the effective level of the package's loggers."""
    return logging.getLogger(ROOT).getEffectiveLevel()


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning the first time a message is seen in this process, unless the log level is above WARNING."""
    if get_verbosity() > logging.WARNING:
        return
    warnings.warn(message, category, stacklevel=3)
