"""Signatures: older ones of the documented hooks, inspected once, at construction; and what models hold privately."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hftrain.core.errors import TaskError, shorten


class Shown:
    """Give subclasses a `repr`: the class, and the constructor's arguments that differ from their defaults."""

    _shown = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown})"


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is noting:  # not when a subclass calls it
            # The text alone: references would keep the user's objects alive, and be searched for optimizers.
            self._shown = ", ".join(_differing(type(self), inspect.signature(init).bind(self, *args, **kwargs)))

    return noting


def _differing(kind: type, given: inspect.BoundArguments) -> list[str]:
    """Return ``name=value`` of the arguments after `self` that are not defaults, those passed on to a base included."""
    inits = [inspect.signature(vars(each)["__init__"]) for each in kind.__mro__[-2::-1] if "__init__" in vars(each)]
    defaults = {name: shorten(each.default) for init in inits for name, each in init.parameters.items()}
    values = {**dict(list(given.arguments.items())[1:]), **given.kwargs}
    passed_on = {name for name, each in given.signature.parameters.items() if each.kind is each.VAR_KEYWORD}
    texts = {name: shorten(value) for name, value in values.items() if name not in passed_on}
    return [f"{name}={text}" for name, text in texts.items() if text != defaults.get(name)]


def check_overrides(kind: type, base: type) -> None:
    """Raise if a subclass overrides a public method of its base with one that cannot be called in its place.

    Raises:
        TaskError: The message names the method and the signature it needs.
    """
    for name, method in inspect.getmembers(base, inspect.isfunction):
        override = inspect.getattr_static(kind, name)
        if name.startswith("_") or override is method or not inspect.isfunction(override):
            continue
        expected = inspect.signature(method)
        fixed = [p for p in expected.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        named = {p.name: None for p in fixed if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(override).bind(*[None] * (len(fixed) - len(named)), **named)
        except TypeError as error:
            raise TaskError(
                f"Cannot call {kind.__name__}.{name}{inspect.signature(override)}:",
                f"it overrides {base.__name__}.{name} and is called with its arguments ({error}).",
                f"Define {name}{plain_signature(method)}.",
            ) from None


def plain_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature without annotations, for messages."""
    found = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=found.empty)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes an argument of that name (or any keyword)."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def without(method: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Return a method that may be called with all keywords of `names`; those that it does not take are left out."""
    try:
        left_out = [name for name in names if not accepts(method, name)]
    except (TypeError, ValueError):  # some functions written in C
        return method

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{name: value for name, value in kwargs.items() if name not in left_out})

    call.__self__ = getattr(method, "__self__", method)  # type: ignore[attr-defined]
    return call if left_out else method


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Return whether a `model_init` function takes the trial of a hyper-parameter search."""
    parameters = inspect.signature(model_init).parameters.values()
    return any(p.name == "trial" or (p.default is p.empty and p.kind < p.VAR_POSITIONAL) for p in parameters)


def taking(function: Callable[..., Any], num_positional: int, name: str) -> Callable[..., Any]:
    """Return a function that takes `name` by keyword or as its last positional argument.

    If `function` takes it by keyword only or in another position, it is passed by keyword; if not at all, dropped.

    Args:
        num_positional: Number of positional arguments before it.
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


def in_context(prepare: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step that runs in the context and on the micro-batch that `prepare` returns."""

    def run(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        make_context, inputs = prepare(model, inputs)
        with make_context():
            return step(model, inputs, num_items_in_batch)

    return run


def call_with(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a hook, of any documented generation, with the documented values that its signature names.

    A hook that takes ``*args`` gets all values in order. If it requires other names, values are passed by position.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*values.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in positional}
    if {p.name for p in positional if p.default is p.empty} <= values.keys():
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return function(**{name: value for name, value in values.items() if takes_any or name in names})
    return function(*list(values.values())[: len(positional)])


# -- what models hold under private names, which have no public way; each stands here only ----------------------------


def uncompiled(model: Any) -> Any:
    """Return the model inside torch.compile's wrapper, or the model itself; does not import the compiler."""
    return getattr(model, "_orig_mod", model)


def layer_hint(model: Any) -> list[str]:
    """Return the class names of a model's repeated layers, by the hint of transformers' models; empty without one."""
    return list(getattr(model, "_no_split_modules", None) or ())


def attention_of(model: Any, default: str = "") -> str:
    """Return how a transformers model computes attention (``"sdpa"``), or the default for another model."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", default))
