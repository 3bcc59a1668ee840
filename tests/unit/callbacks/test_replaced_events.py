"""Methods of the callback handler that somebody has replaced, as SetFit and TRL do, are what a run calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny import Net, make_arguments, make_rows

from hftrain import CallbackHandler, DefaultFlowCallback, Trainer, TrainerCallback


class Hears(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append(("on_step_end", args))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.heard.append(("on_log", args))


def replaced_call_event(handler: Any, theirs: Any, seen: list[str]) -> Any:
    """Return what SetFit puts in the place of `call_event`: other arguments for every callback, and every event."""

    def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        seen.append(event)
        for callback in handler.callbacks:
            result = getattr(callback, event)(theirs, state, control, optimizer=handler.optimizer, **kwargs)
            control = control if result is None else result
        return control

    return call_event


def test_call_event_replaced_on_the_instance_is_what_a_run_calls(tmp_path: Path) -> None:
    hears, seen = Hears(), []
    trainer = Trainer(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows())
    theirs = make_arguments(tmp_path, max_steps=2)
    trainer.callback_handler.callbacks[:] = [DefaultFlowCallback()]
    trainer.callback_handler.call_event = replaced_call_event(trainer.callback_handler, theirs, seen)
    trainer.add_callback(hears)
    trainer.train()
    assert trainer.state.global_step == 2
    assert [name for name, _ in hears.heard].count("on_step_end") == 2
    assert all(args is theirs for _, args in hears.heard)
    # Events that no callback overrides as well.
    assert {"on_train_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_train_end"} <= set(
        seen
    )


def test_replaced_call_event_may_call_the_one_it_replaces() -> None:
    handler = CallbackHandler([Hears], args="ours")
    replaced, seen = handler.call_event, []

    def call_event(event: str, *parts: Any, **kwargs: Any) -> Any:
        seen.append(event)
        return replaced(event, *parts, **kwargs)

    handler.call_event = call_event
    handler.fire("on_step_end")
    handler.on_log("ours", handler.state, handler.control, {"loss": 1.0})
    assert seen == ["on_step_end", "on_log"]
    assert handler.callbacks[0].heard == [("on_step_end", "ours"), ("on_log", "ours")]
    del handler.call_event
    handler.fire("on_step_end")
    assert seen == ["on_step_end", "on_log"]
    assert len(handler.callbacks[0].heard) == 3
    assert handler.heard == {"on_step_end", "on_log"}


def test_event_replaced_on_the_instance_or_in_a_subclass_is_called() -> None:
    class Own(CallbackHandler):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> Any:
            seen.append(logs)
            return super().on_log(args, state, control, logs, **kwargs)

    seen: list[Any] = []
    handler = Own([Hears], args="ours")
    handler.on_save = lambda args, state, control: {"should_training_stop": True}
    handler.fire("on_log", logs={"loss": 1.0})
    assert seen == [{"loss": 1.0}]
    assert handler.callbacks[0].heard == [("on_log", "ours")]
    assert "on_save" in handler.heard
    assert handler.fire("on_save").should_training_stop


def test_handler_that_nobody_changed_fires_by_the_class() -> None:
    handler = CallbackHandler([Hears])
    assert "fire" not in vars(handler)
    handler.call_event = handler.call_event
    assert "fire" not in vars(handler)
