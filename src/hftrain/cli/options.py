"""The command-line option of a dataclass field: argparse settings, and parsing of its text."""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import wraps
from typing import Any, Literal, Union

from hftrain.core.errors import suggest
from hftrain.core.lengths import read_length

_TRUE = ("true", "t", "yes", "y", "1", "on")
_FALSE = ("false", "f", "no", "n", "0", "off")
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable)
_CONTAINERS = (dict, collections.abc.Mapping, tuple, set, frozenset)
# Settings of argparse that a field's metadata may override; by default they follow from the type.
_FROM_METADATA = ("help", "choices", "metavar", "nargs", "type")


def HfArg(
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Declare a dataclass field together with its command-line option.

    Args:
        default: The field's default.
        default_factory: Returns the field's default.
        aliases: Other names of the option, such as ``"-m"``.
        help: The option's help text.
        metadata: Other metadata; "choices", "metavar", "nargs" and "type" are passed to argparse.
        **kwargs: Passed to `dataclasses.field`.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     model: str = HfArg(default="tiny", aliases="-m", help="Which model.")
        >>> Settings().model
        'tiny'

    Source: the documented `HfArg`.
    """
    extra = {name: value for name, value in (("aliases", aliases), ("help", help)) if value is not None}
    return dataclasses.field(
        default=default, default_factory=default_factory, metadata={**(metadata or {}), **extra}, **kwargs
    )


def option_names(field: dataclasses.Field[Any]) -> list[str]:
    """List the names of a field's option: with underscores, with dashes, and its aliases."""
    aliases = field.metadata.get("aliases", ())
    names = [f"--{field.name}", f"--{field.name.replace('_', '-')}"]
    return list(dict.fromkeys([*names, *([aliases] if isinstance(aliases, str) else aliases)]))


def option_settings(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a field."""
    settings = _settings_of_type(hint)
    if field.default_factory is not dataclasses.MISSING:
        settings["default"] = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        settings["default"] = field.default
    elif is_flag(hint):
        settings["default"] = False
    else:
        settings["required"] = True
    return settings | {name: field.metadata[name] for name in _FROM_METADATA if name in field.metadata}


def or_length(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let a reader of numbers return a length with its unit, such as "10ep", as text."""
    return wraps(read)(lambda text: text if read_length(text) else read(text))


def is_flag(hint: Any) -> bool:
    """Tell whether a type is bool, or bool or None."""
    return _members(hint) == [bool]


def _settings_of_type(hint: Any) -> dict[str, Any]:
    members = _members(hint)
    lists = [member for member in members if (typing.get_origin(member) or member) in _LISTS]
    if lists:
        element = next(iter(typing.get_args(lists[0])), str)
        if str not in members:
            return {"type": _reader(element), "nargs": "+"}
        return {"type": _reader(Union[element, str]), "nargs": "+", "action": _OneOrMore}  # noqa: UP007
    settings: dict[str, Any] = {"type": _reader(hint)}
    if bool in members:
        settings |= {"nargs": "?", "const": True}
    if len(members) == 1 and (choices := list(_choices(members[0]).values())):
        settings["choices"] = _Choices(choices)
    return settings


class _Choices(list[Any]):
    """The choices shown in help; contains any value, because the reader has already validated it."""

    def __contains__(self, value: object) -> bool:
        return True


class _OneOrMore(argparse.Action):
    """Store one value as text and several as a list, for a field that accepts both."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def _members(hint: Any) -> list[Any]:
    """Return the types of a union other than None, or the one type."""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    return [member for member in (typing.get_args(hint) if is_union else (hint,)) if member is not type(None)]


def _choices(member: Any) -> dict[str, Any]:
    """Map the texts that an enum or literal type accepts to its values; as in transformers, no members of an enum."""
    if isinstance(member, type) and issubclass(member, Enum):
        return {str(choice.value): choice.value for choice in member}
    if typing.get_origin(member) is Literal:
        return {str(value): value for value in typing.get_args(member) if value is not None}
    return {}


def _reader(hint: Any) -> Callable[[str], Any]:
    """Return a function that converts text to the strictest fitting member of a type."""
    members = sorted(_members(hint), key=_rank)
    if len(members) == 1 and members[0] in (int, float, str):
        return typing.cast("Callable[[str], Any]", members[0])
    parsers = [_parser(member) for member in members]
    known = [choice for member in members for choice in _choices(member)]
    names = " or ".join(str(getattr(member, "__name__", member)) for member in members)

    def read(text: str) -> Any:
        for parse in parsers:
            try:
                return parse(text)
            except (KeyError, TypeError, ValueError):
                continue
        hint = suggest(text, known) if known else "Write true or false." if bool in members else ""
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {'an' if names[0] in 'aei' else 'a'} {names}. {hint}".strip()
        )

    return read


def _rank(member: Any) -> int:
    """Return a sort key for a union's members: the strictest first, text last."""
    order: Sequence[Any] = (int, float, bool)
    if member in order:
        return order.index(member)
    return 5 if member in (str, Any) else 3 if _choices(member) else 4


def _parser(member: Any) -> Callable[[str], Any]:
    if member in (str, Any):
        return str
    if member is bool:
        return _to_bool
    choices = _choices(member)
    if choices:
        return choices.__getitem__
    container = typing.get_origin(member) or member
    if container in _CONTAINERS:
        return lambda text: _from_json(text, container)
    return typing.cast("Callable[[str], Any]", container)


def _to_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(word)
    return word in _TRUE


def _from_json(text: str, container: Any) -> Any:
    """Read a dict, tuple or set from JSON text."""
    value = json.loads(text)
    is_mapping = container in (dict, collections.abc.Mapping)
    if not isinstance(value, dict if is_mapping else list):
        raise ValueError(text)
    return value if is_mapping else container(value)
