from __future__ import annotations

from types import SimpleNamespace

import pytest

from hftrain.callbacks import CallbackHandler, DefaultFlowCallback, TrainerCallback
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState

OFF = {
    "logging_strategy": "no",
    "eval_strategy": "no",
    "save_strategy": "no",
    "logging_first_step": False,
    "eval_delay": 0,
}


def run(*, max_steps=10, steps_per_epoch=4, callbacks=(), intervals=(3, 3, 3), **settings) -> dict[str, list]:
    """Play the loop's part: fire events, note what is asked for at which step, reset the flags."""
    state = TrainerState(max_steps=max_steps, epoch=0.0)
    state.logging_steps, state.eval_steps, state.save_steps = intervals
    control = TrainerControl()
    args = SimpleNamespace(**{**OFF, **settings})
    runner = CallbackHandler([DefaultFlowCallback, *callbacks], args=args, state=state, control=control)
    asked: dict[str, list] = {"log": [], "evaluate": [], "save": []}

    def act() -> None:
        for name, steps in asked.items():
            if getattr(control, f"should_{name}"):
                steps.append(state.global_step)
                setattr(control, f"should_{name}", False)
                runner.fire("on_save" if name == "save" else f"on_{name}")

    runner.fire("on_train_begin")
    while not control.should_training_stop:
        for _ in range(steps_per_epoch):
            state.global_step += 1
            state.epoch = state.global_step / steps_per_epoch
            runner.fire("on_step_end")
            act()
            if control.should_training_stop:
                break
        runner.fire("on_epoch_end")
        act()
    return {**asked, "end": [state.global_step]}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"logging_strategy": "steps"}, {"log": [3, 6, 9]}),
        ({"logging_strategy": "epoch"}, {"log": [4, 8, 10]}),
        ({"logging_strategy": "steps", "logging_first_step": True}, {"log": [1, 3, 6, 9]}),
        ({"logging_first_step": True}, {"log": [1]}),
        ({"eval_strategy": "steps"}, {"evaluate": [3, 6, 9, 10]}),
        ({"eval_strategy": "steps", "eval_delay": 4}, {"evaluate": [6, 9, 10]}),
        ({"eval_strategy": "steps", "eval_delay": 11}, {}),
        ({"eval_strategy": "epoch"}, {"evaluate": [4, 8, 10]}),
        ({"eval_strategy": "epoch", "eval_delay": 2}, {"evaluate": [8, 10]}),
        ({"save_strategy": "steps"}, {"save": [3, 6, 9, 10]}),
        ({"save_strategy": "steps", "max_steps": 9}, {"save": [3, 6, 9], "end": [9]}),
        ({"save_strategy": "epoch"}, {"save": [4, 8, 10]}),
        ({"save_strategy": "best"}, {}),
    ],
)
def test_strategies_become_control_flags_at_their_steps(settings, expected) -> None:
    assert run(**settings) == {"log": [], "evaluate": [], "save": [], "end": [10], **expected}


class StopEarly(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.mark.parametrize(
    ("strategy", "every", "expected"), [("steps", 100, [3]), ("steps", 3, [3]), ("epoch", 100, [3]), ("no", 3, [])]
)
def test_run_stopped_by_another_callback_still_saves_its_end_once(strategy, every, expected) -> None:
    asked = run(callbacks=[StopEarly], eval_strategy="steps", save_strategy=strategy, intervals=(3, 3, every))
    assert (asked["end"], asked["save"]) == ([3], expected)


def test_intervals_may_change_while_training() -> None:
    class LogMoreOften(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            state.logging_steps = 2

    assert run(callbacks=[LogMoreOften], logging_strategy="steps")["log"] == [3, 4, 6, 8, 10]


def test_finished_run_stops_at_once() -> None:
    control = TrainerControl()
    state = TrainerState(global_step=11, max_steps=10)
    DefaultFlowCallback().on_step_end(SimpleNamespace(**OFF), state, control)
    assert control.should_training_stop
