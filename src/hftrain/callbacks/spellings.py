"""What scripts call on `trainer.callback_handler`: one method per event, and the parts as attributes."""

from __future__ import annotations

from functools import partial
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

# What an event answers, as overrides that fire it by hand expect.
_ANSWERED = {"on_log": "should_log", "on_evaluate": "should_evaluate", "on_save": "should_save"}


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

    def call_event(
        self, event: str, args: Any, state: Any, control: Any, report: Any = None, **extra: Any
    ) -> TrainerControl:
        """Call every callback that overrides `event`, with these in place of the runner's own; return the control.

        Args:
            event: One of `hftrain.core.events.EVENTS`.
            args: What callbacks receive as the arguments.
            state: Likewise.
            control: Likewise; mutated.
            report: The logs of ``on_log``, the metrics of ``on_evaluate`` and ``on_predict``.
            **extra: Keywords for this call only.
        """
        if report is not None:
            extra[_REPORTS.get(event, "report")] = report
        own = self.args, self.state, self.control
        self.args, self.state, self.control = args, state, control
        try:
            if event in _ANSWERED:
                setattr(control, _ANSWERED[event], False)
            return self.fire(event, **extra)
        finally:
            self.args, self.state, self.control = own

    @property
    def callback_list(self) -> str:
        """The names of the callbacks' classes, a line each."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def __getattr__(self, name: str) -> Any:
        if name in EVENTS:
            return partial(self.call_event, name)
        if name in CONTEXT:
            return self._context[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CONTEXT:
            self.refresh(**{name: value})
        else:
            super().__setattr__(name, value)
