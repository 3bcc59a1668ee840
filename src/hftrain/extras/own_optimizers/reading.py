"""Read what `configure_optimizers` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hftrain.core.errors import TaskError
from hftrain.extras.own_optimizers.by_hand import OptimizersByHand
from hftrain.extras.own_optimizers.schedules import Schedules, Timed
from hftrain.extras.own_optimizers.several import Optimizers
from hftrain.optim.schedules import follows_metric
from hftrain.task.module import TaskModule


def read_own(task: TaskModule, made: Any) -> tuple[Any, Any]:
    """Return (optimizer, schedule) from `made`, the result of `configure_optimizers`; either may be None."""
    maker = type(task).__name__
    is_single = not isinstance(made, Mapping) or isinstance(made.get("optimizer"), Optimizer)
    if is_single and task.automatic_optimization:
        optimizer, timed = _read_one(made, maker)
        if timed is None or not isinstance(made, Mapping) or (timed.interval, timed.frequency) == ("step", 1):
            return optimizer, timed and timed.scheduler
        return optimizer, Schedules(optimizer, {"": timed})
    found = {str(name): _read_one(each, maker) for name, each in ({"optimizer": made} if is_single else made).items()}
    if missing := [name for name, (optimizer, _) in found.items() if optimizer is None] or not found:
        raise _unreadable(maker, f"it has no optimizer {missing}.", "Return {'name': optimizer, ...}.")
    members = {name: optimizer for name, (optimizer, _) in found.items()}
    joined = Optimizers(members) if task.automatic_optimization else OptimizersByHand(task, members)
    schedules = {name: timed for name, (_, timed) in found.items() if timed is not None}
    if schedules and len(schedules) < len(found):
        raise _unreadable(
            maker,
            f"only {', '.join(schedules)} of {', '.join(found)} have a schedule.",
            "Give each one, or none for that of the arguments; ConstantLR(optimizer, 1.0) keeps a rate.",
        )
    if not schedules:
        return joined, None
    joined.schedules = Schedules(joined, schedules, follows_updates=task.automatic_optimization)
    return joined, joined.schedules


def _read_one(made: Any, maker: str) -> tuple[Any, Timed | None]:
    if isinstance(made, Mapping):
        return _read_dict(made, maker)
    optimizer, schedule = made if isinstance(made, (tuple, list)) and len(made) == 2 else (made, None)
    is_schedule = schedule is None or (hasattr(schedule, "step") and not isinstance(schedule, Optimizer))
    if (optimizer is None or isinstance(optimizer, Optimizer)) and is_schedule:
        return optimizer, schedule and Timed(schedule, "evaluate" if follows_metric(schedule) else "step")
    shown = ", ".join(type(part).__name__ for part in made) if isinstance(made, (tuple, list)) else ""
    raise _unreadable(maker, f"it is a {type(made).__name__}{f' of ({shown})' if shown else ''}.", _remedy(made))


def _read_dict(made: Mapping[str, Any], maker: str) -> tuple[Any, Timed | None]:
    """Read Lightning's form of an optimizer with its schedule."""
    optimizer, timing = made.get("optimizer"), made.get("lr_scheduler")
    if not isinstance(optimizer, Optimizer) or not made.keys() <= {"optimizer", "lr_scheduler", "monitor"}:
        raise _unreadable(
            maker, f"it has the keys {', '.join(map(str, made))}.", "Return {'optimizer': ..., 'lr_scheduler': ...}."
        )
    if timing is None:
        return optimizer, None
    timing = {**timing} if isinstance(timing, Mapping) else {"scheduler": timing}
    timing.setdefault("monitor", made.get("monitor") or "loss")
    if not hasattr(timing.get("scheduler"), "step") or not timing.keys() <= Timed.__dataclass_fields__.keys():
        raise _unreadable(
            maker,
            f"its lr_scheduler has the keys {', '.join(map(str, timing))}.",
            f"It needs 'scheduler', and may have {', '.join(Timed.__dataclass_fields__)}.",
        )
    if follows_metric(timing["scheduler"]) and timing.get("interval") != "step":
        timing["interval"] = "evaluate"
    if timing.get("interval") not in ("step", "epoch", "evaluate"):
        raise _unreadable(
            maker,
            f"its lr_scheduler has interval={timing.get('interval')!r}.",
            "Say 'step' (after each update) or 'epoch': the default is 'epoch' in Lightning, and a pair (optimizer, "
            "schedule) is stepped after each update here.",
        )
    return optimizer, Timed(**timing)


def _unreadable(maker: str, reason: str, remedy: str) -> TaskError:
    return TaskError(
        f"Cannot use what {maker}.configure_optimizers returned:",
        reason,
        f"{remedy} None takes both from the arguments.",
    )


def _remedy(made: Any) -> str:
    """Return what `configure_optimizers` should return instead, for errors."""
    parts = made if isinstance(made, (tuple, list)) else (made,)
    if isinstance(made, type):
        return f"Call it: return {made.__name__}(self.model.parameters(), lr=...)."
    if len(parts) == 2 and all(isinstance(part, (tuple, list)) and len(part) == 1 for part in parts):
        return "Return (optimizer, schedule), or {'optimizer': ..., 'lr_scheduler': ...} to say when it is stepped."
    if len(parts) > 1 and any(isinstance(part, (Optimizer, list, tuple, Mapping)) for part in parts[1:]):
        return "Return several optimizers by name: {'generator': optimizer, 'critic': (optimizer, schedule)}."
    if len(parts) == 1 and hasattr(made, "optimizer") and hasattr(made, "step"):
        return "Return (optimizer, schedule)."
    if len(parts) == 2 and isinstance(parts[0], Optimizer) and callable(parts[1]):
        return "Make a schedule of the function: LambdaLR(optimizer, function)."
    return "Return one optimizer, or one pair (optimizer, schedule) with a schedule that is stepped once per update."
