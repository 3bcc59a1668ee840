"""Parameter groups added to an optimizer after its schedule was created."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from hftrain.optim.schedules import follows_metric

# torch's schedules whose rate depends only on a group's base rate and the step.
_FROM_BASE = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)
# Attributes that a schedule keeps per group: the initial rate, and values that are the same for every group.
_BASE = ("base_lrs", "_init_lrs")
_ALIKE = ("lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def admit_group(schedule: Any, group: dict[str, Any]) -> None:
    """Make a schedule drive a parameter group that was added to its optimizer; mutates both.

    The group's rate is its base rate where the schedule computes rates from one (`LambdaLR`, and with it every schedule
    by name); torch schedules that modify the current rate continue from it. Other per-group values of the schedule
    are copied from the first group.
    """
    if not isinstance(schedule, LRScheduler) and not follows_metric(schedule):
        return
    base, first = group.setdefault("initial_lr", group["lr"]), schedule.optimizer.param_groups[0]
    for part in _leaves(schedule):
        _admit(part, group, base=base)
    if first.get("initial_lr") and any(isinstance(part, _FROM_BASE) for part in _leaves(schedule)):
        group["lr"] = base * (first["lr"] / first["initial_lr"])  # the share that the first group has of its own
    for part in (schedule, *_leaves(schedule)):
        last = getattr(part, "_last_lr", None)
        if isinstance(last, list) and len(last) < len(schedule.optimizer.param_groups):
            last.append(group["lr"])


def dismiss_groups(optimizer: Optimizer, schedules: Iterable[Any], *, num: int) -> None:
    """Make an optimizer and its schedules forget the groups after the first `num`; mutates them."""
    for group in optimizer.param_groups[num:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[num:]
    for part in [part for each in schedules if hasattr(each, "optimizer") for part in (each, *_leaves(each))]:
        for name in (*_BASE, *_ALIKE, "_last_lr"):
            if isinstance(vars(part).get(name), list):
                del vars(part)[name][num:]


def _leaves(schedule: Any) -> list[Any]:
    parts = getattr(schedule, "_schedulers", None)
    return [schedule] if parts is None else [leaf for part in parts for leaf in _leaves(part)]


def _admit(part: Any, group: dict[str, Any], *, base: Any) -> None:
    own, groups = vars(part), part.optimizer.param_groups
    first = groups[0]
    if isinstance(part, CyclicLR):
        part.max_lrs.append(part.max_lrs[0] * (base / part.base_lrs[0] if part.base_lrs[0] else 1.0))
    if isinstance(part, OneCycleLR):
        group.update({name: first[name] * base / first["initial_lr"] for name in ("max_lr", "min_lr")})
    for name in (*_BASE, *_ALIKE):
        if isinstance(own.get(name), list) and len(own[name]) < len(groups):
            own[name].append(base if name in _BASE else own[name][0])
    if own.get("cycle_momentum"):
        names = ("base_momentum", "max_momentum", "betas" if part.use_beta1 else "momentum")
        group.update({name: first[name] for name in names})
