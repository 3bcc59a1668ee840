"""The package's logger: quiet by default, one warning per message."""

from __future__ import annotations

import functools
import logging
import warnings

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


def get_verbosity() -> int:
    """Return the effective level of the package's loggers."""
    return logging.getLogger(ROOT).getEffectiveLevel()


@functools.cache
def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning the first time a message is seen in this process, unless the log level is above WARNING."""
    if get_verbosity() > logging.WARNING:
        return
    warnings.warn(message, category, stacklevel=3)
