"""Read what `configure_optimizers` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hftrain.core.errors import TaskError
from hftrain.extras.own_optimizers.by_hand import OptimizersByHand
from hftrain.extras.own_optimizers.schedules import Schedules, TimedSchedule
from hftrain.extras.own_optimizers.several import Optimizers
from hftrain.optim.schedules import follows_metric
from hftrain.task.module import TaskModule


def read_optimizers(task: TaskModule, result: Any) -> tuple[Any, Any]:
    """Return (optimizer, schedule) from `result`, the result of `configure_optimizers`; either may be None."""
    task_name = type(task).__name__
    is_single = not isinstance(result, Mapping) or isinstance(result.get("optimizer"), Optimizer)
    if is_single and task.automatic_optimization:
        optimizer, timed = _read_pair(result, task_name)
        if timed is None or not isinstance(result, Mapping) or (timed.interval, timed.frequency) == ("step", 1):
            return optimizer, timed and timed.scheduler
        return optimizer, Schedules(optimizer, {"": timed})
    entries = {"optimizer": result} if is_single else result
    pairs = {str(name): _read_pair(entry, task_name) for name, entry in entries.items()}
    if missing := [name for name, (optimizer, _) in pairs.items() if optimizer is None] or not pairs:
        raise _unreadable(task_name, f"it has no optimizer {missing}.", "Return {'name': optimizer, ...}.")
    members = {name: optimizer for name, (optimizer, _) in pairs.items()}
    optimizers = Optimizers(members) if task.automatic_optimization else OptimizersByHand(task, members)
    schedules = {name: timed for name, (_, timed) in pairs.items() if timed is not None}
    if schedules and len(schedules) < len(pairs):
        raise _unreadable(
            task_name,
            f"only {', '.join(schedules)} of {', '.join(pairs)} have a schedule.",
            "Give each one, or none for that of the arguments; ConstantLR(optimizer, 1.0) keeps a rate.",
        )
    if not schedules:
        return optimizers, None
    optimizers.schedules = Schedules(optimizers, schedules, follows_updates=task.automatic_optimization)
    return optimizers, optimizers.schedules


def _read_pair(result: Any, task_name: str) -> tuple[Any, TimedSchedule | None]:
    if isinstance(result, Mapping):
        return _read_dict(result, task_name)
    optimizer, schedule = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
    is_schedule = schedule is None or (hasattr(schedule, "step") and not isinstance(schedule, Optimizer))
    if (optimizer is None or isinstance(optimizer, Optimizer)) and is_schedule:
        return optimizer, schedule and TimedSchedule(schedule, "evaluate" if follows_metric(schedule) else "step")
    types = ", ".join(type(part).__name__ for part in result) if isinstance(result, (tuple, list)) else ""
    reason = f"it is a {type(result).__name__}{f' of ({types})' if types else ''}."
    raise _unreadable(task_name, reason, _remedy(result))


def _read_dict(result: Mapping[str, Any], task_name: str) -> tuple[Any, TimedSchedule | None]:
    """Read Lightning's form of an optimizer with its schedule."""
    optimizer, schedule = result.get("optimizer"), result.get("lr_scheduler")
    if not isinstance(optimizer, Optimizer) or not result.keys() <= {"optimizer", "lr_scheduler", "monitor"}:
        keys = ", ".join(map(str, result))
        raise _unreadable(task_name, f"it has the keys {keys}.", "Return {'optimizer': ..., 'lr_scheduler': ...}.")
    if schedule is None:
        return optimizer, None
    schedule = {**schedule} if isinstance(schedule, Mapping) else {"scheduler": schedule}
    schedule.setdefault("monitor", result.get("monitor") or "loss")
    known = TimedSchedule.__dataclass_fields__
    if not hasattr(schedule.get("scheduler"), "step") or not schedule.keys() <= known.keys():
        reason = f"its lr_scheduler has the keys {', '.join(map(str, schedule))}."
        raise _unreadable(task_name, reason, f"It needs 'scheduler', and may have {', '.join(known)}.")
    if follows_metric(schedule["scheduler"]) and schedule.get("interval") != "step":
        schedule["interval"] = "evaluate"
    if schedule.get("interval") not in ("step", "epoch", "evaluate"):
        raise _unreadable(
            task_name,
            f"its lr_scheduler has interval={schedule.get('interval')!r}.",
            "Say 'step' (after each update) or 'epoch': the default is 'epoch' in Lightning, and a pair (optimizer, "
            "schedule) is stepped after each update here.",
        )
    return optimizer, TimedSchedule(**schedule)


def _unreadable(task_name: str, reason: str, remedy: str) -> TaskError:
    return TaskError(
        f"Cannot use what {task_name}.configure_optimizers returned:",
        reason,
        f"{remedy} None takes both from the arguments.",
    )


def _remedy(result: Any) -> str:
    """Return what `configure_optimizers` should return instead, for errors."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if isinstance(result, type):
        return f"Call it: return {result.__name__}(self.model.parameters(), lr=...)."
    if len(parts) == 2 and all(isinstance(part, (tuple, list)) and len(part) == 1 for part in parts):
        return "Return (optimizer, schedule), or {'optimizer': ..., 'lr_scheduler': ...} to say when it is stepped."
    if len(parts) > 1 and any(isinstance(part, (Optimizer, list, tuple, Mapping)) for part in parts[1:]):
        return "Return several optimizers by name: {'generator': optimizer, 'critic': (optimizer, schedule)}."
    if len(parts) == 1 and hasattr(result, "optimizer") and hasattr(result, "step"):
        return "Return (optimizer, schedule)."
    if len(parts) == 2 and isinstance(parts[0], Optimizer) and callable(parts[1]):
        return "Make a schedule of the function: LambdaLR(optimizer, function)."
    return "Return one optimizer, or one pair (optimizer, schedule) with a schedule that is stepped once per update."
