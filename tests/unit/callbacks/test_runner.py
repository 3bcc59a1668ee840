from __future__ import annotations

import json
import pickle
import sys
from types import SimpleNamespace

import pytest

from hftrain.callbacks import CallbackHandler, PrinterCallback, TrainerCallback
from hftrain.core.errors import CheckpointError
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.extras.early_stopping import EarlyStoppingCallback


def make_runner(*callbacks, args=None, **context) -> CallbackHandler:
    return CallbackHandler(callbacks, args=args, state=TrainerState(), control=TrainerControl(), **context)


class Recorder(TrainerCallback):
    def __init__(self, name="recorder", calls=None):
        self.name = name
        self.calls = [] if calls is None else calls

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.append((self.name, args, state, control, kwargs))


class StopAfterTen(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= 10:
            return {"should_training_stop": True}
        return {}


def returning(value):
    class Returning(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            return value

    return Returning()


def test_fire_calls_in_list_order_with_the_documented_arguments() -> None:
    calls: list = []
    first, second = Recorder("first", calls), PrinterCallback()
    runner = make_runner(first, second, args="args", model="net")
    with pytest.warns(UserWarning, match="two callbacks of the type Recorder"):
        runner.add(Recorder("third", calls))
    assert runner.fire("on_step_end", metrics={"a": 1}) is runner.control
    assert [call[0] for call in calls] == ["first", "third"]
    _, args, state, control, kwargs = calls[0]
    assert (args, state, control) == ("args", runner.state, runner.control)
    names = {
        "model",
        "processing_class",
        "tokenizer",
        "optimizer",
        "lr_scheduler",
        "train_dataloader",
        "eval_dataloader",
        "logger",  # ours: what callbacks log with
        "data_ranks",  # ours: the processes that read different samples
    }
    assert set(kwargs) == names | {"metrics"}
    assert kwargs["model"] == "net"
    assert kwargs["optimizer"] is None


def test_guide_example_stops_at_the_tenth_step() -> None:
    runner = make_runner(StopAfterTen)
    for step in range(1, 100):
        runner.state.global_step = step
        if runner.fire("on_step_end").should_training_stop:
            break
    assert step == 10


@pytest.mark.parametrize("value", [{"should_save": True}, TrainerControl(should_save=True)])
def test_fire_copies_returned_flags_into_the_one_control(value) -> None:
    runner = make_runner(returning(value), Recorder)
    control = runner.control
    assert runner.fire("on_log") is control is runner.control
    assert control == TrainerControl(should_save=True)
    runner.fire("on_step_end")
    assert runner.callbacks[1].calls[0][3] is control


def test_runner_accepts_an_object_that_has_some_of_the_methods() -> None:
    class Duck:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_log = True

    runner = make_runner(Duck)
    assert runner.heard == {"on_step_end"}
    assert runner.fire("on_step_end").should_log


def test_pop_matches_class_then_identity_and_is_silent_otherwise() -> None:
    class Child(Recorder):
        pass

    child, printer = Child(), PrinterCallback()
    runner = make_runner(child, printer)
    assert runner.pop(PrinterCallback()) is None
    assert runner.pop(EarlyStoppingCallback) is None
    assert runner.pop(Recorder) is child
    assert runner.pop(printer) is printer
    assert runner.callbacks == []
    runner.remove(printer)


def test_callback_may_remove_itself_while_being_called() -> None:
    class Once(Recorder):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control)
            runner.remove(self)

    runner = make_runner(Once, PrinterCallback)
    once = runner.callbacks[0]
    runner.fire("on_step_end")
    runner.fire("on_step_end")
    assert len(once.calls) == 1


def patient(patience: int, counter: int) -> EarlyStoppingCallback:
    callback = EarlyStoppingCallback(patience)
    callback.early_stopping_patience_counter = counter
    return callback


def counters(runner: CallbackHandler) -> list[tuple[int, int]]:
    found = [callback for callback in runner.callbacks if isinstance(callback, EarlyStoppingCallback)]
    return [(callback.early_stopping_patience, callback.early_stopping_patience_counter) for callback in found]


@pytest.mark.filterwarnings("ignore:There are two callbacks of the type")
@pytest.mark.parametrize("carry", [lambda s: json.loads(json.dumps(s)), lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("saved", [[(3, 2)], [(3, 2), (5, 4)]])
def test_restore_replaces_callbacks_in_place_and_sets_the_control(saved, carry) -> None:
    before = make_runner(PrinterCallback, *(patient(*numbers) for numbers in saved))
    before.control.should_epoch_stop = True
    states = carry(before.stateful_states())
    assert set(states) == {"EarlyStoppingCallback", "TrainerControl"}
    assert isinstance(states["EarlyStoppingCallback"], list) == (len(saved) > 1)

    after = make_runner(*(EarlyStoppingCallback() for _ in saved), PrinterCallback)
    control = after.control
    after.restore(states)
    assert counters(after) == saved
    assert isinstance(after.callbacks[-1], PrinterCallback)
    assert after.control is control
    assert control == TrainerControl(should_epoch_stop=True)
    after.args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    after.fire("on_evaluate", metrics={"eval_loss": float("nan")})
    assert counters(after) == [(patience, count + 1) for patience, count in saved]


@pytest.mark.filterwarnings("ignore:There are two callbacks of the type")
@pytest.mark.parametrize("present", [[], [EarlyStoppingCallback]])
def test_restore_warns_of_states_without_a_callback(present) -> None:
    states = make_runner(patient(3, 1), patient(5, 1)).stateful_states()
    runner = make_runner(*present)
    with pytest.warns(UserWarning, match="EarlyStoppingCallback"):
        runner.restore(states)
    assert counters(runner) == [(3, 1)][: len(present)]


@pytest.mark.parametrize(
    "states",
    [
        {"EarlyStoppingCallback": {"args": {"tolerance": 1}, "attributes": {}}},
        {"EarlyStoppingCallback": None},
        {"TrainerControl": {"args": {"should_dance": True}}},
        {"TrainerControl": {}},
    ],
)
def test_restore_refuses_a_state_that_does_not_fit(states) -> None:
    with pytest.raises(CheckpointError, match="does not fit the class"):
        make_runner(EarlyStoppingCallback).restore(states)


def test_callback_that_names_what_transformers_passes_needs_no_more() -> None:
    seen = []

    class Exact(TrainerCallback):
        def on_step_end(
            self,
            args,
            state,
            control,
            model=None,
            processing_class=None,
            optimizer=None,
            lr_scheduler=None,
            train_dataloader=None,
            eval_dataloader=None,
        ):
            seen.append((model, optimizer))
            if len(seen) > 1:
                raise ValueError("mine")

    runner = CallbackHandler([Exact], "net", optimizer="adam")
    runner.fire("on_step_end")
    assert seen == [("net", "adam")]
    with pytest.raises(ValueError, match="mine") as found:
        runner.fire("on_step_end")
    if sys.version_info >= (3, 11):
        assert "of the callback Exact" in "".join(found.value.__notes__)
