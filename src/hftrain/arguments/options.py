"""The declaration of a setting, and its command-line option where a field takes more than one type.

transformers' `HfArgumentParser` reads one type of each field, but uses an action of argparse in its metadata.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field
from functools import wraps
from typing import Any

from hftrain.core.lengths import read_length


def setting(default: Any, text: str, option: Callable[..., argparse.Action] | None = None, **more: Any) -> Any:
    """Return a dataclass field with its help text; a class as default is called for each instance.

    Args:
        option: Makes its command-line option, where the type alone does not say what it takes.
    """
    kind = "default_factory" if isinstance(default, type) else "default"
    metadata = {"help": text} if option is None else {"help": text, "action": option}
    return field(metadata=metadata, **{kind: default}, **more)


class _Option(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if isinstance(values, list) and len(values) == 1 else values)


def several(**settings: Any) -> argparse.Action:
    """Return an option that takes one text, or several as a list."""
    return _Option(**{**settings, "nargs": "+"})


def number_or_length(*, type: Callable[[str], Any], **settings: Any) -> argparse.Action:
    """Return an option that takes a number, or a length with its unit, such as "10ep", as text."""
    return _Option(type=wraps(type)(lambda text: text if read_length(text) else type(text)), **settings)


def flag_or_word(*, type: Callable[[str], Any], **settings: Any) -> argparse.Action:
    """Return an option that takes a flag, or another word, which is checked with the arguments."""

    def read(text: str) -> Any:
        try:
            return type(text)
        except argparse.ArgumentTypeError:
            return text

    return _Option(type=read, **settings)
