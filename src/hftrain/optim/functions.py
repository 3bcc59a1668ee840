"""The documented functions that create a schedule for an optimizer, for code with its own loop.

They create the schedules of `lr_scheduler_type`; each takes the optimizer first and returns a torch scheduler.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hftrain.core.errors import ConfigError
from hftrain.optim.schedules import ScheduleConfig, build_schedule, schedules

_NEED_NO_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")
_NEED_NO_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")


def get_scheduler(
    name: Any,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """Return a learning-rate schedule by name.

    Args:
        name: A name of `lr_scheduler_type`.
        optimizer: Mutated: its groups' rates become the schedule's first.
        num_warmup_steps: Optimizer updates of the warm-up; most schedules require it.
        num_training_steps: Optimizer updates of the run; most schedules require it.
        scheduler_specific_kwargs: Further options of the schedule.

    Raises:
        ConfigError: The name or an option is unknown, or a number is missing.

    Source: the documented `get_scheduler`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=4)
        >>> optimizer.param_groups[0]["lr"]
        0.0
    """
    name = str(getattr(name, "value", name))
    options = dict(scheduler_specific_kwargs or {})
    needs_length = name not in _NEED_NO_LENGTH and "num_stable_steps" not in options
    for argument, value, is_needed in (
        ("num_warmup_steps", num_warmup_steps, name in schedules.names() and name not in _NEED_NO_WARMUP),
        ("num_training_steps", num_training_steps, name in schedules.names() and needs_length),
    ):
        if is_needed and value is None:
            reason = f"the schedule depends on {argument}."
            raise ConfigError(f"Cannot make the schedule {name!r}:", reason, f"Pass {argument}.")
    warmup = 0 if name in _NEED_NO_WARMUP else num_warmup_steps or 0
    return _make(name, optimizer, warmup, num_training_steps, options=options)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LRScheduler:
    """Return a schedule with a constant learning rate. Source: the documented function, as for the following ones."""
    return _make("constant", **locals())


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    """Return torch's `ReduceLROnPlateau`; the keywords are its own."""
    return _make("reduce_lr_on_plateau", optimizer, options=kwargs)


def get_greedy_schedule(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    """Return a `GreedyLR`; the keywords are its own."""
    return _make("greedy", optimizer, options=kwargs)


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LRScheduler:
    """Return a schedule with linear warmup, then a constant learning rate."""
    return _make("constant_with_warmup", **locals())


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LRScheduler:
    """Return a schedule with linear warmup, then linear decay to 0."""
    return _make("linear", **locals())


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, last_epoch: int = -1
) -> LRScheduler:
    """Return a schedule with linear warmup, then cosine decay, by default half a cosine wave."""
    return _make("cosine", **locals())


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1, last_epoch: int = -1
) -> LRScheduler:
    """Return a schedule with linear warmup, then `num_cycles` cosine decays with hard restarts."""
    return _make("cosine_with_restarts", **locals())


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LRScheduler:
    """Return a schedule with linear warmup, then polynomial decay to `lr_end`."""
    return _make("polynomial", **locals())


def get_inverse_sqrt_schedule(
    optimizer: Optimizer, num_warmup_steps: int, timescale: int | None = None, last_epoch: int = -1
) -> LRScheduler:
    """Return a schedule with linear warmup, then inverse square root decay."""
    return _make("inverse_sqrt", **locals())


def get_cosine_with_min_lr_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> LRScheduler:
    """Return a cosine schedule that ends at `min_lr`, or at the share `min_lr_rate` of the initial learning rate."""
    return _make("cosine_with_min_lr", **locals())


def get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> LRScheduler:
    """Return the same cosine schedule one update ahead, so that no update has a learning rate of 0."""
    return _make("cosine_warmup_with_min_lr", **locals())


def get_wsd_schedule(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LRScheduler:
    """Return a warmup-stable-decay schedule; the length of the run or of the stable part is required.

    Raises:
        ConfigError: Neither is given.
    """
    if num_training_steps is None and num_stable_steps is None:
        asked, reason = "Cannot make a warm-up, stable and decay schedule:", "nothing says how long its stable part is."
        raise ConfigError(asked, reason, "Pass num_training_steps or num_stable_steps.")
    return _make("warmup_stable_decay", **locals())


def _make(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
    options: dict[str, Any] | None = None,
    **own: Any,
) -> LRScheduler:
    """Build a schedule by name; options that are None are left out.

    Args:
        options: The schedule's own options; None takes them from `own`.
        own: The further arguments of the documented function.
    """
    options = own if options is None else options
    total = num_warmup_steps if num_training_steps is None else num_training_steps
    if name == "warmup_stable_decay" and options.get("num_stable_steps") is not None:
        # The stages alone determine its length.
        total = num_warmup_steps + int(options["num_stable_steps"]) + int(options.get("num_decay_steps") or 0)
    config = ScheduleConfig(
        name=name,
        num_training_steps=total,
        num_warmup_steps=num_warmup_steps,
        last_step=last_epoch,
        options={key: value for key, value in options.items() if value is not None},
    )
    return build_schedule(config, optimizer)
