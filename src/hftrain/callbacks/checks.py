"""Checks of callbacks before the runner accepts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hftrain.core.elsewhere import lightning_base, names_elsewhere, warn_of_uncalled
from hftrain.core.errors import HFTrainError, TaskError, a_kind, suggest
from hftrain.core.events import EVENTS
from hftrain.core.notes import add_note


def as_list(callbacks: Any) -> list[Any]:
    """Return callbacks, given as None, one callback or several, as a list."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]


def check_callback(callback: Any) -> None:
    """Raise unless a callback (or its class) has a method for an event, and no hook that is never called."""
    cls = callback if isinstance(callback, type) else type(callback)
    # Lightning's own base class has on_train_end, which takes other arguments.
    if lightning_base(cls) == "Callback" and not callable(getattr(cls, "on_step_end", None)):
        raise TaskError(
            f"Cannot use {cls.__name__}, a callback of Lightning's:",
            "its methods are called by other names and with other arguments.",
            names_elsewhere("lightning_names").get(cls.__name__)
            or "Derive it from hftrain.TrainerCallback; on_train_batch_end becomes "
            "on_step_end(self, args, state, control, **kwargs).",
        )
    if lightning_base(cls) is None:
        # What several classes define is an event of another library's base class.
        names = [name for each in cls.__mro__ for name in vars(each) if name.startswith("on_")]
        own_names = {name for name in names if names.count(name) == 1} - {*EVENTS}
        hooks = {name: suggest(name, EVENTS) for name in sorted(own_names)}
        for name, event in names_elsewhere("events").items():
            hooks[name] = f"Define {event}(self, args, state, control, **kwargs)."
        warn_of_uncalled(cls, {**hooks, **names_elsewhere("other_events"), **names_elsewhere("callback_methods")})
    if not any(callable(getattr(callback, event, None)) for event in EVENTS):
        remedy = "Pass an object or a class derived from TrainerCallback, which defines events such as on_step_end."
        if isinstance(callback, (list, tuple)):
            remedy = "Pass all callbacks in one flat list."
        raise TaskError(
            f"Cannot use {callback!r} as a callback: it is text."
            if isinstance(callback, str)
            else f"Cannot use {a_kind(callback)} as a callback: it has no method that is named after an event.",
            "",
            remedy,
        )


def note_callback(error: Exception, handler: Any, event: str, context: Mapping[str, Any]) -> None:
    """Add a note to an error about the user callback that raised it, and its arguments."""
    cls = type(getattr(handler, "__self__", handler))
    if isinstance(error, HFTrainError) or cls.__module__.startswith("hftrain."):
        return
    text = f"Raised in {event} of the callback {cls.__name__}."
    reports = [f"{name}: {', '.join(context[name])}" for name in ("metrics", "logs") if context.get(name)]
    if isinstance(error, KeyError) and reports:
        text += f" There is no such key in {'; '.join(reports)}."
    elif isinstance(error, (KeyError, TypeError)):
        text += f" It is called with args, state, control and the keywords {', '.join(context)}."
    add_note(error, text)


def check_signature(callback: Any, event: str, method: Callable[..., Any], context: Iterable[str]) -> None:
    """Raise if a callback's method does not accept the arguments of its event."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # some functions written in C
        return
    try:
        # Bound partially, because some events pass further keywords.
        signature.bind_partial(None, None, None, **dict.fromkeys(context))
    except TypeError as error:
        name = type(callback).__name__
        raise TaskError(
            f"Cannot call {name}.{event}{signature}:",
            f"it is called with (args, state, control, **kwargs) ({error}).",
            f"Define {event}(self, args, state, control, **kwargs).",
        ) from None
