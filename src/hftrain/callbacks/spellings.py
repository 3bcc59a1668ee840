"""What scripts call on `trainer.callback_handler`: one method per event, and the parts as attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hftrain.core.events import EVENTS
from hftrain.core.progress import TrainerControl

CONTEXT = (
    "model",
    "processing_class",
    "tokenizer",
    "optimizer",
    "lr_scheduler",
    "train_dataloader",
    "eval_dataloader",
)

_REPORTS = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}

# The flags that an event answers, or resets, as code that fires it by hand expects.
_ANSWERED: dict[str, tuple[str, ...]] = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}


class HandlerSpellings:
    """Let overrides of `log` or `evaluate` fire events by the names they know.

    ``trainer.callback_handler.on_log(args, state, control, logs)`` is `fire`, and ``callback_handler.eval_dataloader``
    reads and sets what callbacks receive.
    """

    args: Any
    state: Any
    control: TrainerControl
    callbacks: list[Any]
    _context: dict[str, Any]

    if TYPE_CHECKING:

        def fire(self, event: str, **extra: Any) -> TrainerControl:
            """Call every callback that overrides `event`."""

        def refresh(self, **context: Any) -> None:
            """Replace keywords that callbacks receive."""

        def add(self, callback: Any) -> None:
            """Append a callback."""

        def pop(self, callback: Any) -> Any:
            """Remove and return a callback."""

    def call_event(self, event: str, args: Any, state: Any, control: Any, **extra: Any) -> TrainerControl:
        """Call every callback that overrides `event`, with these in place of the runner's own; return the control.

        Args:
            **extra: Keywords for this call only: the `logs` of ``on_log``, the `metrics` of ``on_evaluate``.
        """
        own = self.args, self.state, self.control
        self.args, self.state, self.control = args, state, control
        try:
            # The class's, for on the instance it may lead back here.
            return type(self).fire(self, event, **extra)
        finally:
            self.args, self.state, self.control = own

    def add_callback(self, callback: Any) -> None:
        """Append a callback, a class or an instance. Source: the documented `CallbackHandler.add_callback`."""
        self.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback. Source: the documented `CallbackHandler.pop_callback`."""
        return self.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback. Source: the documented `CallbackHandler.remove_callback`."""
        self.pop(callback)

    @property
    def callback_list(self) -> str:
        """The names of the callbacks' classes, a line each."""
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
            if name in EVENTS or name == "call_event":
                self.refresh()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in EVENTS or name == "call_event":
            self.refresh()

    @staticmethod
    def _answer(event: str, control: TrainerControl) -> None:
        for flag in _ANSWERED.get(event, ()):
            setattr(control, flag, False)


def _firing(event: str) -> Any:
    def fire(
        self: HandlerSpellings, args: Any, state: Any, control: Any, report: Any = None, **extra: Any
    ) -> TrainerControl:
        self._answer(event, control)
        if report is not None:
            extra[_REPORTS.get(event, "report")] = report
        return self.call_event(event, args, state, control, **extra)

    fire.__name__, fire.__doc__ = event, f"Call every callback that overrides `{event}`; return the control."
    return fire


# On the class, so that subclasses can call them through `super()`.
for _event in EVENTS:
    setattr(HandlerSpellings, _event, _firing(_event))
