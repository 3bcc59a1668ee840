"""Users' options, as text or as a mapping: parsed, checked against the known ones, and cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from hftrain.core.errors import ConfigError

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_options(options: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Parse `optim_args`: a mapping, or text of the form ``"key=value, key=value"``.

    Source: the documented `optim_args`.

    Example:
        >>> parse_options("momentum=0.9, nesterov = True")
        {'momentum': '0.9', 'nesterov': 'True'}
    """
    if not isinstance(options, str):
        return dict(options or {})
    pieces = [[part.strip() for part in piece.split("=")] for piece in options.split(",")] if options.strip() else []
    parsed = {piece[0]: piece[-1] for piece in pieces}
    if len(parsed) < len(pieces) or any(len(piece) != 2 or not all(piece) for piece in pieces):
        raise ConfigError(
            f"Cannot use optim_args={options!r}.",
            "It must be 'key=value' pairs separated by commas, each key once.",
            "Write it like 'momentum=0.9, nesterov=True', or pass a dict.",
        )
    return parsed


def refuse_unknown(
    options: Iterable[str], known: Iterable[str], *, owner: str, field: str, reason: str = "It has no such option."
) -> None:
    """Raise if an option is unknown.

    Args:
        owner: The setting that takes the options, as the user wrote it (``"optim='sgd'"``).
    """
    known = sorted(known)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"Cannot use {owner} with {field} {', '.join(map(repr, unknown))}.",
            reason,
            f"It takes: {', '.join(known)}." if known else "It takes none.",
            **{field: list(options)},
        )


def cast_options(options: Mapping[str, Any], hints: Mapping[str, Any], *, owner: str) -> dict[str, Any]:
    """Cast option values by the type hints.

    Example:
        >>> cast_options({"nesterov": "False", "momentum": "0.9"}, {"nesterov": bool, "momentum": float}, owner="sgd")
        {'nesterov': False, 'momentum': 0.9}
    """
    reason = "It has no such option; learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon are settings."
    refuse_unknown(options, hints, owner=owner, field="optim_args", reason=reason)
    cast = {}
    for key, value in options.items():
        try:
            cast[key] = _cast(str(value), get_args(hints[key]) or (hints[key],))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"Cannot use {owner} with optim_args {key}={value!r}.",
                f"{key} must be {getattr(hints[key], '__name__', hints[key])}.",
                "Correct the value.",
            ) from error
    return cast


def _cast(text: str, kinds: tuple[Any, ...]) -> Any:
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        # bool("False") is True, so the words are looked up instead.
        return _BOOLEANS[text.lower()]
    if float in kinds:
        return float(text)
    return int(text) if int in kinds else text
