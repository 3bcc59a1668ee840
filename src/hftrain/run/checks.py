"""Refuse a schedule that ends early, an optimizer that was replaced, and control flags that only some ranks set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import OneCycleLR

from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.default_flow import DefaultFlowCallback
from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.progress import Counter, TrainerControl
from hftrain.loops.fit import AFTER_ACTING, pass_flags
from hftrain.optim.schedules import follows_metric
from hftrain.run.parts import RunParts, TrainerHooks

_ACTIONS = ("should_log", "should_evaluate", "should_save")
# The flags that the loop itself has cleared since the check before, by event.
_CLEARED: dict[str, tuple[str, ...]] = {
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_end": _ACTIONS,
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    AFTER_ACTING: _ACTIONS,
}


def check_schedule(args: TrainingArguments, schedule: Any, *, max_steps: int) -> None:
    """Raise if the user's schedule ends before the run; warn if it depends on evaluations, and none is planned."""
    if isinstance(schedule, OneCycleLR) and schedule.total_steps < max_steps:
        raise ConfigError(
            f"Cannot train {max_steps} steps with this OneCycleLR:",
            f"it ends after total_steps={schedule.total_steps}, and it is stepped once per update.",
            f"Make it with total_steps={max_steps}.",
        )
    if follows_metric(schedule) and args.eval_strategy == "no":
        warn_once(
            f"{type(schedule).__name__} is stepped after each evaluation, but eval_strategy='no' asks for "
            "none: the learning rate stays as it is unless a callback evaluates. Set eval_strategy."
        )


def check_kept(trainer: TrainerHooks, kept: tuple[Any, Any]) -> None:
    """Raise if a callback has replaced the optimizer or the schedule that the run steps and saves."""
    for name, own, inner in zip(("optimizer", "lr_scheduler"), kept, ("optimizer", "scheduler"), strict=True):
        found = getattr(trainer, name)
        if found is not own and getattr(found, inner, None) is not own:  # accelerate's wrapper holds the same one
            raise ConfigError(
                f"Cannot go on with another trainer.{name}:",
                "it was replaced during the run, which steps and saves the one that it began with.",
                "Change that one (its param_groups, add_param_group), or make the new one before the run: "
                f"override create_{name.replace('lr_', '')}, or pass optimizers=(...).",
                now=type(found).__name__,
                was=type(own).__name__,
            )


def flag_check(parts: RunParts) -> Callable[[str], None]:
    """Return a check that all ranks have the same control flags; see `FitHooks`. Collective.

    It raises `StrategyError`, which names flag, value and ranks. Flags that follow from the arguments cost nothing. A
    rank on which a callback has set or cleared others waits for the notes of the other ranks.
    """
    control, watch = parts.control, parts.strategy.watch
    if watch is None:
        return pass_flags
    # The flags that this rank knows all ranks to have.
    expected, num_checks = TrainerControl(), Counter()
    agreement = watch.agreement(
        num_checks,
        problem="Cannot continue with control flags that only some ranks set.",
        remedy="Set the same flags on every rank: decide by what all ranks know, such as the step or the metrics that "
        "on_evaluate is given.",
    )
    # It answers the same when it is asked a second time, which a subclass may not.
    flow = next((each for each in parts.events.callbacks if type(each) is DefaultFlowCallback), None)

    def check(event: str) -> None:
        for name in _CLEARED.get(event, ()):
            setattr(expected, name, False)
        if flow is not None and event in ("on_step_end", "on_epoch_end"):
            getattr(flow, event)(parts.args, parts.state, expected)
        found = {name: bool(getattr(control, name)) for name in vars(expected)}
        if found != vars(expected):
            agreement.check([f"{name}={value}" for name, value in found.items() if value != getattr(expected, name)])
            expected.update(found)
        num_checks.value += 1

    return check
