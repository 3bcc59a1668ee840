"""The documented hooks of a Trainer, looked up where they are called, also in their older signatures."""

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


def _differing(kind: type, call: inspect.BoundArguments) -> list[str]:
    """Return ``name=value`` of the arguments after `self` that are not defaults, those passed on to a base included."""
    inits = [inspect.signature(vars(each)["__init__"]) for each in kind.__mro__[-2::-1] if "__init__" in vars(each)]
    defaults = {name: shorten(each.default) for init in inits for name, each in init.parameters.items()}
    values = {**dict(list(call.arguments.items())[1:]), **call.kwargs}
    passed_on = {name for name, each in call.signature.parameters.items() if each.kind is each.VAR_KEYWORD}
    texts = {name: shorten(value) for name, value in values.items() if name not in passed_on}
    return [f"{name}={text}" for name, text in texts.items() if text != defaults.get(name)]


def check_overrides(kind: type, base: type) -> None:
    """Raise if a subclass overrides a public method of its base with one that cannot be called in its place."""
    for name, method in inspect.getmembers(base, inspect.isfunction):
        override = inspect.getattr_static(kind, name)
        if name.startswith("_") or override is method or not inspect.isfunction(override):
            continue
        signature = inspect.signature(method)
        parameters = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(override).bind(*[None] * (len(parameters) - len(keywords)), **keywords)
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


# Of hooks that are called by other names than their own.
_PRIVATE_NAMES = {"evaluate_in_training": "_evaluate"}


class Hooks:
    """What the parts of a Trainer call of it that its users may replace, and whether they have.

    `hooks.wrap_model` is the present `_wrap_model` of the Trainer, and so are the others with a private name.

    Args:
        defined: Returns what its class defines; whatever else a subclass, an instance or a library has, is an override.
            A function of a module, because a search sends Trainers to other processes.

    Attributes:
        trial: The current trial of a search, from its backend, which several hooks are given.
        compute_loss: The documented method, callable in its newer form; like the next three set by `resolve`.
    """

    trial: Any = None
    compute_loss: Callable[..., Any]
    training_step: Callable[..., Any]
    get_batch_samples: Callable[..., Any]
    log: Callable[..., Any]

    def __init__(self, owner: Any, defined: Callable[[], Mapping[str, Any]]) -> None:
        self.owner, self._defined = owner, defined

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "owner":  # while being copied
            raise AttributeError(name)
        return getattr(self.owner, _PRIVATE_NAMES.get(name, f"_{name}"))

    def is_overridden(self, *names: str) -> bool:
        """Tell whether the user's class or instance, or a library, overrides any of these documented methods."""
        kind, own = type(self.owner), vars(self.owner)
        return any(name in own or getattr(kind, name) is not self._defined()[name] for name in names)

    def is_users(self, *names: str) -> bool:
        """Tell whether any of these methods is overridden outside the package."""
        kind, own = type(self.owner), vars(self.owner)
        modules = [getattr(getattr(kind, name), "__module__", "") for name in names if self.is_overridden(name)]
        return any(name in own for name in names) or not all(each.startswith("hftrain.") for each in modules)

    def resolve(self) -> None:
        """Inspect the hooks of a step, so that overrides in the older forms work and a step makes no decision.

        Done when the Trainer is made, and again at the start of each documented call, for scripts assign hooks.
        """
        owner = self.owner
        self.compute_loss = taking(owner.compute_loss, 3, "num_items_in_batch")
        self.training_step = taking(owner.training_step, 2, "num_items_in_batch")
        if self.is_overridden("_prepare_context_parallel_inputs"):
            self.training_step = in_context(self.prepare_context_parallel_inputs, self.training_step)
        self.get_batch_samples = taking(owner.get_batch_samples, 2, "device")
        self.log = taking(owner.log, 1, "start_time")
        self.walks_inputs = self.is_overridden("_prepare_input")
        self.counts_items_itself = self.is_overridden("_get_num_items_in_batch")
        self.makes_contexts = self.is_overridden("autocast_smart_context_manager")
