"""Call the callbacks that override an event, in list order, with one control object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from hftrain.callbacks.base import TrainerCallback
from hftrain.callbacks.checks import check_callback, check_signature, note_callback
from hftrain.core.errors import CheckpointError, TaskError
from hftrain.core.events import EVENTS
from hftrain.core.log import warn_once
from hftrain.core.preserve import temporarily
from hftrain.core.signatures import without
from hftrain.core.state import Counter, TrainerControl, TrainerState
from hftrain.core.tree import is_alike

Handler = Callable[..., Any]

DOCUMENTED = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
# What transformers does not pass, or no longer; a callback need not take them.
_EXTRA = ("tokenizer", "logger", "data_ranks")
CONTEXT = (*DOCUMENTED, *_EXTRA)
_REPORTS = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}
# The flags that an event resets, as code that fires it itself expects.
_RESET_FLAGS: dict[str, tuple[str, ...]] = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}
_REPLACEABLE = ("call_event", *EVENTS)


class CallbackHandler:
    """Hold the callbacks of a run and call the methods they override.

    Overridden methods are looked up when callbacks are added or removed and by `refresh`, never during training.
    Overrides of `log` or `evaluate` may use the documented names: ``handler.on_log(args, state, control, logs)`` fires
    the event, and ``handler.eval_dataloader`` gets or sets the loader that callbacks receive.

    Args:
        callbacks: Classes (instantiated without arguments) or instances, in call order. Any object with a method named
            after an event is accepted.
        model: Keyword argument passed to every callback.
        processing_class: The same, also passed as `tokenizer`.
        optimizer: The same.
        lr_scheduler: The same.
        args: The arguments passed to every callback. A Trainer sets its own when the handler is assigned.
        state: The state passed to every callback; assign `handler.state` to replace it.
        control: The one control object; it is changed but never replaced.
        **context: Further keyword arguments for every callback; see `refresh`.

    Raises:
        TaskError: A callback has no method named after an event.

    Source: the documented `CallbackHandler`.

    Example:
        >>> class Stop(TrainerCallback):
        ...     def on_step_end(self, args, state, control, **kwargs):
        ...         return {"should_training_stop": True}
        >>> handler = CallbackHandler([Stop])
        >>> handler.fire("on_step_end").should_training_stop, sorted(handler.heard)
        (True, ['on_step_end'])
    """

    heard: frozenset[str]
    _shows_weights = False
    answers: bool = False
    """Whether events reset the flags of the control that caused them (`on_log`: `should_log`), as documented."""

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        *,
        args: Any = None,
        state: TrainerState | None = None,
        control: TrainerControl | None = None,
        **context: Any,
    ) -> None:
        self.args = args
        self.state = TrainerState() if state is None else state
        self.control = TrainerControl() if control is None else control
        self.callbacks: list[Any] = []
        # Events fired, from which a thread detects progress; not an attribute of its own, whose setting is slow here.
        self.num_fired = Counter()
        self._context: dict[str, Any] = dict.fromkeys(CONTEXT)
        for callback in callbacks:
            self._append(callback)
        optional = {"processing_class": processing_class} if processing_class is not None else {}
        self.refresh(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, **{**optional, **context})

    def add(self, callback: Any) -> None:
        """Append a callback (class or instance); warn if one of the same class is already present.

        Raises:
            TaskError: It has no method named after an event.
        """
        self._append(callback)
        self._resolve()

    def pop(self, callback: Any) -> Any:
        """Remove and return the first callback of a class, or the given instance; return None if absent."""
        for index, candidate in enumerate(self.callbacks):
            if isinstance(candidate, callback) if isinstance(callback, type) else candidate is callback:
                del self.callbacks[index]
                self._resolve()
                return candidate
        return None

    def remove(self, callback: Any) -> None:
        """Remove a callback, found as by `pop`."""
        self.pop(callback)

    add_callback, pop_callback, remove_callback = add, pop, remove

    def at_point(self, name: str) -> list[Callable[..., Any]]:
        """Return the methods at a point of `Guest`, of the callbacks that define it."""
        return [method for each in self.callbacks if callable(method := getattr(each, name, None))]

    @contextmanager
    def evaluation_weights(self, *, live: bool = False) -> Iterator[None]:
        """Enter the `evaluation_weights()` of every callback that defines it; contexts within do nothing more.

        Args:
            live: Evaluate the weights that train instead.
        """
        with ExitStack() as stack:
            for swap in () if self._shows_weights or live else self.at_point("evaluation_weights"):
                stack.enter_context(swap())
            was_showing, self._shows_weights = self._shows_weights, True
            try:
                yield
            finally:
                self._shows_weights = was_showing

    @property
    def callback_list(self) -> str:
        """The class names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def __getattr__(self, name: str) -> Any:
        if name in CONTEXT:
            return self._context[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CONTEXT:
            self.refresh(**{name: value})
        else:
            super().__setattr__(name, value)
            if name in _REPLACEABLE:
                self.refresh()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in _REPLACEABLE:
            self.refresh()

    def refresh(self, **context: Any) -> None:
        """Replace keyword arguments of the callbacks and look up their overridden methods again.

        Args:
            **context: `model`, `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader`;
                `tokenizer` is another name for `processing_class`. Omitted ones are unchanged.
        """
        for name, alias in (("processing_class", "tokenizer"), ("tokenizer", "processing_class")):
            if name in context:
                context.setdefault(alias, context[name])
        self._context.update(context)
        self._resolve()

    def fire(self, event: str, **extra: Any) -> TrainerControl:
        """Call every callback that overrides `event`; update and return the control object.

        Args:
            event: One of `hftrain.core.events.EVENTS`.
            **extra: Keyword arguments for this call only; they override the context.

        Raises:
            TaskError: A callback returned something other than control flags.
        """
        control = self.control
        self.num_fired.value += 1
        if self.answers:
            _answer(event, control)
        handlers = self._handlers[event]
        if handlers:
            context = {**self._context, **extra} if extra else self._context
            try:
                for handler in handlers:
                    result = handler(self.args, self.state, control, **context)
                    if result is not None and result is not control:
                        self._adopt(result, handler, event)
            except Exception as error:
                note_callback(error, handler, event, context)
                raise
        return control

    def close_run(self) -> None:
        """Call `close_run` of the callbacks that define it, and drop the loaders; also after an error."""
        for close in self.at_point("close_run"):
            close()
        self.refresh(train_dataloader=None, eval_dataloader=None)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **extra: Any) -> TrainerControl:
        """Call every callback that overrides `event` with the given objects; return the control.

        Args:
            **extra: Keyword arguments for this call only, such as the `logs` of ``on_log``.
        """
        with temporarily(self, args=args, state=state, control=control):
            # The method of the class, because that of the instance may call this one.
            return type(self).fire(self, event, **extra)

    def stateful_states(self) -> dict[str, Any]:
        """Return the states of all exportable callbacks and of the control, by class name.

        The states of several callbacks of one class are a list in callback order.
        """
        states_by_name: dict[str, list[Any]] = {}
        for source in (*filter(_is_exportable, self.callbacks), self.control):
            states_by_name.setdefault(type(source).__name__, []).append(source.state())
        return {name: states if len(states) > 1 else states[0] for name, states in states_by_name.items()}

    def restore(self, states: Mapping[str, Any], *, is_full: bool = True) -> None:
        """Restore saved states into the callbacks of the same class.

        A saved state without a matching callback causes a warning; callbacks without a saved state are unchanged.

        Args:
            states: What `stateful_states` returned.
            is_full: Rebuild the callbacks from their saved states, including constructor arguments, and restore the
                control flags. Otherwise only the callbacks' attributes are restored.

        Raises:
            CheckpointError: A saved state does not fit its class.
        """
        indices_by_name: dict[str, list[int]] = {}
        for index, callback in enumerate(self.callbacks):
            if _is_exportable(callback):
                indices_by_name.setdefault(type(callback).__name__, []).append(index)
        ignored = []
        for name, entry in states.items():
            if name == type(self.control).__name__:
                if is_full:
                    with _fitting_state(name, entry):
                        self.control.update(entry["args"])
                continue
            saved_states = entry if isinstance(entry, list) else [entry]
            if len(saved_states) > len(indices_by_name.get(name, ())):
                ignored.append(name)
            for index, state in zip(indices_by_name.get(name, ()), saved_states, strict=False):
                # A tracker's callback has an open connection, so it is kept, and only gets the run to continue.
                callback = self.callbacks[index]
                is_rebuilt = getattr(callback, "is_rebuilt", True)
                with _fitting_state(name, state):
                    _check_attributes(callback, state)
                    restored = type(callback).from_state(state) if is_rebuilt else None
                if is_full and is_rebuilt:
                    self.callbacks[index] = restored
                else:
                    vars(callback).update(state.get("attributes", {}))
        if ignored:
            warn_once(f"Ignoring the state of callbacks in the checkpoint that this run does not have: {ignored}.")
        self._resolve()

    def _append(self, callback: Any) -> None:
        check_callback(callback)
        callback = callback() if isinstance(callback, type) else callback
        if any(type(other) is type(callback) for other in self.callbacks):
            warn_once(f"There are two callbacks of the type {type(callback).__name__}; both will be called.")
        for event in (name for name in EVENTS if _overridden(callback, name)):
            check_signature(callback, event, getattr(callback, event), DOCUMENTED)
        self.callbacks.append(callback)

    def _resolve(self) -> None:
        self._handlers: dict[str, tuple[Handler, ...]] = {
            event: tuple(handler for callback in self.callbacks if (handler := _overridden(callback, event)))
            for event in EVENTS
        }
        self.heard = frozenset(event for event, handlers in self._handlers.items() if handlers)
        replaced_names = {name for name in _REPLACEABLE if self._is_replaced(name)}
        vars(self).pop("fire", None)
        if replaced_names:
            self.heard = frozenset(EVENTS) if "call_event" in replaced_names else self.heard | replaced_names
            # Set on the instance, so that other instances need no check.
            vars(self)["fire"] = partial(self._fire_replaced, replaced_names)

    def _is_replaced(self, name: str) -> bool:
        """Return whether a subclass, or an assignment to the instance, has replaced a method."""
        return getattr(getattr(self, name), "__func__", None) is not _METHODS[name]

    def _fire_replaced(self, replaced_names: Set[str], event: str, **extra: Any) -> TrainerControl:
        """Fire an event through the methods that replace the documented ones."""
        if self.answers:
            _answer(event, self.control)
        name = event if event in replaced_names else "call_event"
        arguments = (self.args, self.state, self.control)
        method = getattr(self, name)
        result = method(*arguments, **extra) if name == event else method(event, *arguments, **extra)
        if result is not None and result is not self.control:
            self._adopt(result, method, event)
        return self.control

    def _adopt(self, result: Any, handler: Handler, event: str) -> None:
        flags = result.__dict__ if isinstance(result, TrainerControl) else result
        owner = type(getattr(handler, "__self__", handler)).__name__
        if not isinstance(flags, Mapping):
            raise TaskError(
                f"Cannot use what {owner}.{event} returned:",
                f"a {type(result).__name__} has no flags of the control.",
                "Return None, the control, or a mapping such as {'should_training_stop': True}.",
            )
        try:
            self.control.update(dict(flags))
        except AttributeError as error:
            raise TaskError(
                f"Cannot use what {owner}.{event} returned:", str(error), "", returned=dict(flags)
            ) from None


def _answer(event: str, control: TrainerControl) -> None:
    for flag in _RESET_FLAGS.get(event, ()):
        setattr(control, flag, False)


def _firing(event: str) -> Any:
    def fire(
        self: CallbackHandler, args: Any, state: Any, control: Any, report: Any = None, **extra: Any
    ) -> TrainerControl:
        _answer(event, control)
        if report is not None:
            extra[_REPORTS.get(event, "report")] = report
        return self.call_event(event, args, state, control, **extra)

    fire.__name__, fire.__doc__ = event, f"Call every callback that overrides `{event}`; return the control."
    return fire


# On the class, so that subclasses can call them through `super()`.
for _event in EVENTS:
    setattr(CallbackHandler, _event, _firing(_event))

# As they are here: a library may replace methods of the classes themselves.
_METHODS = {name: getattr(CallbackHandler, name) for name in _REPLACEABLE}
_INHERITED = {event: getattr(TrainerCallback, event) for event in EVENTS}


def _overridden(callback: Any, event: str) -> Handler | None:
    """Return the callback's method for an event, or None if it does not override that of the base class."""
    method: Handler | None = getattr(callback, event, None)
    is_inherited = getattr(method, "__func__", None) is _INHERITED[event]
    return without(method, _EXTRA) if callable(method) and not is_inherited else None


def _is_exportable(callback: Any) -> bool:
    return callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None))


@contextmanager
def _fitting_state(name: str, state: Any) -> Iterator[None]:
    """Convert errors of a class that cannot restore a saved state into `CheckpointError`."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Cannot restore the saved state of {name}.",
            f"It does not fit the class ({type(error).__name__}: {error}).",
            "Use the version that wrote the checkpoint, or restore_callback_states_from_checkpoint=False.",
            saved=state,
        ) from error


def _check_attributes(callback: Any, state: Any) -> None:
    """Raise if a state would replace a method, or a value of another type."""
    current = callback.state()
    for part in ("args", "attributes"):
        values = state.get(part, {}) if isinstance(state, Mapping) else None
        is_fit = isinstance(values, Mapping) and all(
            is_alike(value, current[part][name], is_deep=False)
            if name in current.get(part, {})
            else not hasattr(type(callback), name)
            for name, value in values.items()
        )
        if not is_fit:
            raise TypeError(f"its {part} are not those of the class")
