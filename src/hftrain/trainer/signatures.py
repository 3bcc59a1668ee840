"""Older forms of the documented hooks keep working: signatures are looked at once, at construction."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function takes an argument of that name (or any keyword)."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Tell whether a function that makes models wants the trial of a hyper-parameter search."""
    parameters = inspect.signature(model_init).parameters.values()
    return any(p.name == "trial" or (p.default is p.empty and p.kind < p.VAR_POSITIONAL) for p in parameters)


def taking(function: Callable[..., Any], num_positional: int, name: str) -> Callable[..., Any]:
    """Return a function that takes `name` by keyword or as its last positional argument.

    Where `function` takes it by keyword only, or in another place, it is handed on so; where not at all, dropped.

    Args:
        function: A hook, possibly overridden with an older signature.
        num_positional: How many positional arguments come before.
        name: The argument that newer signatures have.
    """
    parameters = inspect.signature(function).parameters
    takes_rest = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    takes_name = accepts(function, name)
    in_place = list(parameters.values())[num_positional : num_positional + 1]
    if any(p.name == name and p.kind is p.POSITIONAL_OR_KEYWORD for p in in_place):
        return function

    def adapted(*args: Any, **kwargs: Any) -> Any:
        if takes_name:
            kwargs.update(zip([name], args[num_positional:], strict=False))
        else:
            kwargs.pop(name, None)
        return function(*(args if takes_rest and not takes_name else args[:num_positional]), **kwargs)

    return adapted
