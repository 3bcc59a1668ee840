"""Learning-rate schedules by name, as torch's schedulers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hftrain.core.errors import ConfigError, check_known
from hftrain.core.lazy import from_transformers
from hftrain.core.log import warn_once
from hftrain.core.registry import Registry
from hftrain.optim import multipliers
from hftrain.optim.multipliers import FALLS, RISES
from hftrain.optim.optimizers import refuse_unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The choice of a schedule and its length.

    Args:
        last_step: The last completed update of a resumed run; -1 for a new one.

    Units:
        num_training_steps, num_warmup_steps: optimizer updates.

    Source: the documented `lr_scheduler_type`, `warmup_steps`, `warmup_ratio` and `lr_scheduler_kwargs`.
    """

    name: str = "linear"
    num_training_steps: int
    num_warmup_steps: int = 0
    last_step: int = -1
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: Any, *, num_training_steps: int) -> ScheduleConfig:
        """Return the config that the training arguments choose."""
        # With a constant rate the optimizer does the warm-up; other schedules also do their own, as documented.
        warms_up_itself = (
            str(args.optim) in ("schedule_free_adamw", "schedule_free_sgd")
            and str(args.lr_scheduler_type) == "constant"
            and args.get_warmup_steps(max(args.max_steps, 0)) > 0
        )
        return cls(
            name=str(args.lr_scheduler_type),
            num_training_steps=num_training_steps,
            num_warmup_steps=0 if warms_up_itself else args.get_warmup_steps(num_training_steps),
            options=dict(args.lr_scheduler_kwargs or {}),
        )


def build_schedule(config: ScheduleConfig, optimizer: Optimizer) -> LRScheduler:
    """Build the schedule of an optimizer; sets the groups' rates to the schedule's first value.

    Args:
        optimizer: Mutated. Absolute rates (`lr_end`, `min_lr`) relate to its default `lr`.

    Returns:
        A scheduler to step once per optimizer update, or with the metric after each evaluation, see `follows_metric`.
        Its state dict holds only plain values.

    Source: the documented `Trainer.create_scheduler`.
    """
    return schedules.create(config.name, config=config, optimizer=optimizer)


def refresh_rate(schedule: LRScheduler) -> None:
    """Set the rates of a restored schedule at its step; they differ from the saved ones if the run is longer now.

    Mutates the optimizer's groups. Applies only to schedules that multiply a base rate.
    """
    if isinstance(schedule, LambdaLR):
        groups = schedule.optimizer.param_groups
        for group, base, multiply in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * multiply(schedule.last_epoch)


def follows_metric(schedule: Any) -> bool:
    """Return whether a schedule is stepped with a metric after evaluations, as torch's and transformers' `GreedyLR`."""
    kinds = type(schedule).__mro__
    return isinstance(schedule, ReduceLROnPlateau) or any(kind.__name__ == "GreedyLR" for kind in kinds)


def by_metric(config: ScheduleConfig, optimizer: Optimizer, *, kind: Callable[..., Any]) -> LRScheduler:
    """Return a handler for a schedule that follows a metric; the options are its keyword arguments."""
    parameters = inspect.signature(kind).parameters
    options = {name: parameter for name, parameter in parameters.items() if name not in {"optimizer", "verbose"}}
    _check_options(config, options, has_warmup=False)
    with _impossible_is_config_error(config):
        schedule: LRScheduler = kind(optimizer, **config.options)
    return schedule


def greedy(config: ScheduleConfig, optimizer: Optimizer) -> LRScheduler:
    """Return transformers' `GreedyLR`."""
    return by_metric(config, optimizer, kind=from_transformers("transformers.optimization", "GreedyLR"))


def by_multiplier(
    config: ScheduleConfig,
    optimizer: Optimizer,
    *,
    multiplier: Callable[..., float],
    adapt: Callable[..., dict[str, Any]] | None = None,
) -> LRScheduler:
    """Return a handler for a schedule that multiplies every group's base rate.

    The run's facts (`warmup`, `total`, `base_lr`) and the options are passed to both functions by parameter name.

    Args:
        multiplier: Maps a step to a multiplier. Parameters with a default are options; the others are facts or come
            from `adapt`.
        adapt: Converts facts and its own options to arguments of the multiplier.
    """
    base_lr = getattr(optimizer, "defaults", {}).get("lr")  # a wrapper may have none
    facts = {"warmup": config.num_warmup_steps, "total": config.num_training_steps, "base_lr": base_lr}
    parameters = inspect.signature(multiplier).parameters
    adapt_parameters = inspect.signature(adapt).parameters if adapt else {}
    options = {name: parameter for name, parameter in parameters.items() if parameter.default is not parameter.empty}
    options |= {name: parameter for name, parameter in adapt_parameters.items() if name not in facts}
    _check_options(config, options, has_warmup="warmup" in parameters)
    values = {**facts, **config.options}
    with _impossible_is_config_error(config):
        arguments = {name: value for name, value in values.items() if name in parameters}
        if adapt:
            arguments |= adapt(**{name: value for name, value in values.items() if name in adapt_parameters})
        multiply = functools.partial(multiplier, **arguments)
        # Compute one value of each phase now, so that a bad option fails before the end of the warm-up.
        for step in (0, config.num_warmup_steps, max(config.num_warmup_steps, config.num_training_steps - 1)):
            multiply(step)
    return LambdaLR(optimizer, multiply, config.last_step)


def _check_options(config: ScheduleConfig, options: Mapping[str, inspect.Parameter], *, has_warmup: bool) -> None:
    owner = f"lr_scheduler_type={config.name!r}"
    refuse_unknown(config.options, options, owner=owner, field="lr_scheduler_kwargs")
    required = {name for name, parameter in options.items() if parameter.default is parameter.empty}
    missing = sorted(required - set(config.options))
    if missing:
        raise ConfigError(
            f"Cannot use {owner}.",
            f"It needs {', '.join(missing)}.",
            "Add that to lr_scheduler_kwargs.",
            lr_scheduler_kwargs=dict(config.options),
        )
    if config.num_warmup_steps and not has_warmup:
        warn_once(f"{owner} has no warm-up: the {config.num_warmup_steps} warm-up steps asked for are ignored.")
    elif config.num_warmup_steps > config.num_training_steps:
        warn_once(
            f"The warm-up takes {config.num_warmup_steps} steps, and the run has {config.num_training_steps}: the "
            "learning rate never reaches its full value. Set warmup_steps to less."
        )


@contextmanager
def _impossible_is_config_error(config: ScheduleConfig) -> Iterator[None]:
    """Report arithmetic that the user's numbers make impossible as an error in the settings."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"Cannot use lr_scheduler_type={config.name!r}.",
            f"It cannot be computed with these settings: {error}.",
            "Correct them.",
            lr_scheduler_kwargs=dict(config.options),
            num_training_steps=config.num_training_steps,
            num_warmup_steps=config.num_warmup_steps,
        ) from error


def end_rate(*, base_lr: float, lr_end: float = 1e-7) -> dict[str, Any]:
    """Convert the final rate to a share of the learning rate."""
    if not base_lr > lr_end:
        raise ConfigError(
            f"Cannot use lr_end={lr_end}.",
            "The schedule falls to it, so it must be below the learning rate.",
            "Lower lr_end in lr_scheduler_kwargs, or raise learning_rate.",
            lr_end=lr_end,
            learning_rate=base_lr,
        )
    return {"end_rate": float(lr_end / base_lr)}


def min_rate(*, base_lr: float, min_lr: float | None = None, min_lr_rate: float | None = None) -> dict[str, Any]:
    """Convert the lowest rate, given as a rate or as a share, to a share of the learning rate."""
    if min_lr is not None and min_lr_rate is None:
        return {"min_rate": _share(float(min_lr / base_lr), "min_lr / learning_rate")}
    if min_lr_rate is not None and min_lr is None:
        return {"min_rate": _share(min_lr_rate, "min_lr_rate")}
    raise ConfigError(
        "Cannot build a cosine schedule with a minimum.",
        "It needs exactly one of min_lr (a rate) and min_lr_rate (a share of the learning rate).",
        "Give one of them in lr_scheduler_kwargs.",
        min_lr=min_lr,
        min_lr_rate=min_lr_rate,
    )


def stages(
    *,
    warmup: int,
    total: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
) -> dict[str, Any]:
    """Return the stage lengths of `warmup_stable_decay`; the stable stage fills the run unless its length is given.

    Warns once when the stages and the run differ in length.
    """
    check_known(warmup_type, RISES, f"Cannot use warmup_type={warmup_type!r}.", "There is no such shape.")
    check_known(decay_type, FALLS, f"Cannot use decay_type={decay_type!r}.", "There is no such shape.")
    stable = total - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    if min(stable, num_decay_steps) < 0:
        raise ConfigError(
            f"Cannot fit {warmup} warm-up and {num_decay_steps} decay steps into a run of {total}.",
            f"The stable stage would have {stable} steps and the decay {num_decay_steps}.",
            "Lower num_decay_steps or the warm-up, or train longer.",
            num_decay_steps=num_decay_steps,
            num_stable_steps=num_stable_steps,
        )
    if warmup + stable + num_decay_steps != total:
        warn_once(
            f"The schedule's stages last {warmup} + {stable} + {num_decay_steps} steps and the run {total}; "
            "num_stable_steps is followed."
        )
    return {
        "stable": stable,
        "decay": num_decay_steps,
        "warmup_type": warmup_type,
        "decay_type": decay_type,
        "min_rate": _share(min_lr_ratio, "min_lr_ratio"),
    }


def _share(value: float, option: str) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(
            f"Cannot use {option}={value}.",
            "The schedule falls to that share of the learning rate, so it must lie between 0 and 1.",
            "Correct it in lr_scheduler_kwargs, or change learning_rate.",
            **{option: value},
        )
    return value


schedules: Registry[LRScheduler] = Registry("lr_scheduler_type", group="hftrain.schedules")
schedules.register("reduce_lr_on_plateau", by_metric, kind=ReduceLROnPlateau)
schedules.register("greedy", greedy)
for _multiplier, _adapt in (
    (multipliers.linear, None),
    (multipliers.cosine, None),
    (multipliers.cosine_with_restarts, None),
    (multipliers.polynomial, end_rate),
    (multipliers.constant, None),
    (multipliers.constant_with_warmup, None),
    (multipliers.inverse_sqrt, None),
    (multipliers.cosine_with_min_lr, min_rate),
    (multipliers.cosine_warmup_with_min_lr, min_rate),
    (multipliers.warmup_stable_decay, stages),
):
    schedules.register(_multiplier.__name__, by_multiplier, multiplier=_multiplier, adapt=_adapt)
