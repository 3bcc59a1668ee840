"""The names that downstream overrides call on `trainer.callback_handler`."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hftrain import TrainerCallback, TrainerState
from hftrain.callbacks.runner import CallbackHandler
from hftrain.core.state import TrainerControl


class Hears(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.heard.append((args, logs, control.should_log, kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append((args, state, control))


def make_runner() -> tuple[CallbackHandler, Hears]:
    callback = Hears()
    return CallbackHandler([callback], "net", args="own", state=TrainerState(), control=TrainerControl()), callback


def test_event_by_its_name_reaches_the_callbacks() -> None:
    runner, callback = make_runner()
    runner.control.should_log = True
    assert runner.on_log(runner.args, runner.state, runner.control, {"loss": 1.0}) is runner.control
    runner.on_log(runner.args, runner.state, runner.control, logs={"loss": 2.0})
    assert callback.heard == [("own", {"loss": 1.0}, False, "net"), ("own", {"loss": 2.0}, False, "net")]


def test_event_by_its_name_hands_on_other_parts_for_one_call() -> None:
    runner, callback = make_runner()
    state, control = TrainerState(), TrainerControl()
    assert runner.call_event("on_step_end", "other", state, control) is control
    assert callback.heard == [("other", state, control)]
    assert runner.args == "own"
    assert runner.control is not control


def test_context_is_read_and_set_by_name() -> None:
    runner, callback = make_runner()
    assert runner.model == "net"
    assert runner.eval_dataloader is None
    runner.model = "other"
    runner.on_log("a", runner.state, runner.control, {})
    assert callback.heard[-1][-1] == "other"
    assert runner.callback_list == "Hears"


def test_other_names_are_missing_and_copies_work() -> None:
    runner, _ = make_runner()
    with pytest.raises(AttributeError, match="has no attribute 'on_lunch'"):
        runner.on_lunch  # noqa: B018
    assert copy.deepcopy(runner).model == "net"
