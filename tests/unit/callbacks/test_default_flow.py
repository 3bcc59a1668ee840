from __future__ import annotations

from types import SimpleNamespace

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


def test_intervals_may_change_while_training() -> None:
    class LogMoreOften(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            state.logging_steps = 2

    assert run(callbacks=[LogMoreOften], logging_strategy="steps")["log"] == [3, 4, 6, 8, 10]
