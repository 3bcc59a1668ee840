"""The package's errors, by what the user has to fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class HFTrainError(Exception):
    """Base class of all hftrain errors; takes a message or the parts that `explain` takes."""

    def __init__(self, asked: str = "", reason: str = "", remedy: str = "", /, **received: Any) -> None:
        super().__init__(explain(asked, reason, remedy, **received))


class ConfigError(HFTrainError, ValueError):
    """A setting is invalid; raised before a device or process group is used."""


class UnknownArgumentError(ConfigError, TypeError):
    """A function does not take a keyword; also a `TypeError`, which code that supports several versions catches."""


class MissingDependencyError(HFTrainError, ImportError):
    """An optional package is not installed or too old."""


class StrategyError(HFTrainError, RuntimeError):
    """Starting processes, placing a model or communicating failed."""


class CheckpointError(HFTrainError, RuntimeError):
    """A checkpoint cannot be written or found, or is not valid."""


class NonFiniteError(CheckpointError):
    """A checkpoint was not written because weights or losses are NaN or infinite, as set by `on_nonfinite`."""


class TaskError(HFTrainError, TypeError):
    """A task, model or dataset does not work as the Trainer requires."""


def explain(asked: str, reason: str, remedy: str, /, **received: Any) -> str:
    """Compose an error message of the project's three parts and the received values that they do not show yet.

    Args:
        **received: The offending settings, shown as ``name=value``, on one line and shortened.

    Example:
        >>> explain("Cannot use precision='fp17'.", "No precision has that name.", "Use 'fp16'.", device="cpu")
        "Cannot use precision='fp17'. No precision has that name. Use 'fp16'. Received: device='cpu'."
    """
    text = " ".join(part for part in (asked, reason, remedy) if part)
    values = (f"{name}={shorten(value)}" for name, value in received.items() if f"{name}={value!r}" not in text)
    return f"{text} Received: {listing}." if (listing := ", ".join(values)) else text


def read_json(path: Any, asked: str, remedy: str) -> Any:
    """Return the content of a JSON file that a setting names, or raise `ConfigError`."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(asked, f"{error}.", remedy) from error


def shorten(value: object, width: int = 120) -> str:
    """Return a value's `repr` on one line, cut to a width."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def listed(names: Sequence[Any], most: int = 3) -> str:
    """Return the first of some names as text, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def a_kind(value: object) -> str:
    """Return the name of a value's type with an indefinite article.

    Example:
        >>> a_kind(3), a_kind([])
        ('an int', 'a list')
    """
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


def clash(one: str, other: str, reason: str) -> ConfigError:
    """Return the error for two settings of which only one can be kept."""
    return ConfigError(f"Cannot use {one} together with {other}.", reason, "Keep one of the two.")


def check_known(name: Any, known: Iterable[Any], asked: str, reason: str) -> None:
    """Raise `ConfigError` for a name that is not known, with what it may have meant."""
    if name not in known:
        raise ConfigError(asked, reason, suggest(str(name), known))


def suggest(name: str, known: Iterable[str]) -> str:
    """Compose a hint for a misspelt name: close matches, else the whole list; case and hyphens are ignored.

    Example:
        >>> suggest("ddpp", ["ddp", "single"])
        "Did you mean 'ddp'?"
    """
    known = sorted(known)
    keys = {each: _fold(each) for each in known}
    extensions = [each for each in known if name and keys[each].startswith(_fold(name))]
    matches = difflib.get_close_matches(_fold(name), keys.values())
    similar = sorted((each for each in known if keys[each] in matches), key=lambda each: matches.index(keys[each]))
    hints = (extensions + [each for each in similar if each not in extensions])[:3]
    if hints:
        return "Did you mean " + " or ".join(repr(match) for match in hints) + "?"
    return "Known names: " + ", ".join(known) + "."


def _fold(name: str) -> str:
    return str(name).strip().lower().replace("-", "_")


Row = tuple[Any, str, str, str] | tuple[Any, str, str, str, dict[str, Any]]


def refuse(rows: Iterable[Row]) -> None:
    """Raise for the first row whose condition holds; it has what cannot be used, reason, remedy and received values."""
    for row in rows:
        if row[0]:
            raise ConfigError(row[1], row[2], row[3], **(row[4] if len(row) == 5 else {}))
