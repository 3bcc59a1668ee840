"""Parameter groups added to an optimizer after its schedule was created."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from hftrain.optim.schedules import follows_metric

# torch's schedules whose rate depends only on a group's base rate and the step.
_BASE_RATE_SCHEDULES = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)
# Attributes that a schedule keeps per group: the initial rate, and values that are the same for every group.
_BASE = ("base_lrs", "_init_lrs")
_PER_GROUP = ("lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def admit_group(schedule: Any, group: dict[str, Any]) -> None:
    """Make a schedule drive a parameter group that was added to its optimizer; mutates both.

    The group's rate is its base rate where the schedule computes rates from one (`LambdaLR`, and with it every schedule
    by name); torch schedules that modify the current rate continue from it. Other per-group values of the schedule
    are copied from the first group.
    """
    if not isinstance(schedule, LRScheduler) and not follows_metric(schedule):
        return
    rate, first = group.setdefault("initial_lr", group["lr"]), schedule.optimizer.param_groups[0]
    schedules = _simple_schedules(schedule)
    for simple in schedules:
        _extend_schedule(simple, group, rate=rate)
    if first.get("initial_lr") and any(isinstance(simple, _BASE_RATE_SCHEDULES) for simple in schedules):
        group["lr"] = rate * (first["lr"] / first["initial_lr"])  # the share that the first group has of its own
    for simple in (schedule, *schedules):
        last_rates = getattr(simple, "_last_lr", None)
        if isinstance(last_rates, list) and len(last_rates) < len(schedule.optimizer.param_groups):
            last_rates.append(group["lr"])


def dismiss_groups(optimizer: Optimizer, schedules: Iterable[Any], *, num: int) -> None:
    """Make an optimizer and its schedules forget the groups after the first `num`; mutates them."""
    for group in optimizer.param_groups[num:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[num:]
    for schedule in schedules:
        for part in (schedule, *_simple_schedules(schedule)) if hasattr(schedule, "optimizer") else ():
            for name in (*_BASE, *_PER_GROUP, "_last_lr"):
                if isinstance(vars(part).get(name), list):
                    del vars(part)[name][num:]


def _simple_schedules(schedule: Any) -> list[Any]:
    parts = getattr(schedule, "_schedulers", None)
    return [schedule] if parts is None else [leaf for part in parts for leaf in _simple_schedules(part)]


def _extend_schedule(schedule: Any, group: dict[str, Any], *, rate: Any) -> None:
    """Add the group's values to a schedule's lists, which torch fills only when it is constructed."""
    values, groups = vars(schedule), schedule.optimizer.param_groups
    first = groups[0]
    if isinstance(schedule, CyclicLR):
        schedule.max_lrs.append(schedule.max_lrs[0] * (rate / schedule.base_lrs[0] if schedule.base_lrs[0] else 1.0))
    if isinstance(schedule, OneCycleLR):
        group.update({name: first[name] * rate / first["initial_lr"] for name in ("max_lr", "min_lr")})
    for name in (*_BASE, *_PER_GROUP):
        if isinstance(values.get(name), list) and len(values[name]) < len(groups):
            values[name].append(rate if name in _BASE else values[name][0])
    if values.get("cycle_momentum"):
        names = ("base_momentum", "max_momentum", "betas" if schedule.use_beta1 else "momentum")
        group.update({name: first[name] for name in names})
