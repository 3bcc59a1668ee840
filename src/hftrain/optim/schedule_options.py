"""Schedule options that depend on the run: checked, and converted to arguments of the multipliers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hftrain.core.errors import ConfigError, suggest
from hftrain.core.log import warn_once
from hftrain.optim.multipliers import FALLS, RISES


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
        "warmup_type": _known(warmup_type, RISES, "warmup_type"),
        "decay_type": _known(decay_type, FALLS, "decay_type"),
        "min_rate": _share(min_lr_ratio, "min_lr_ratio"),
    }


def _known(name: str, names: Iterable[str], option: str) -> str:
    if name not in names:
        raise ConfigError(
            f"Cannot use {option}={name!r}.", "There is no such shape.", suggest(name, names), **{option: name}
        )
    return name


def _share(value: float, option: str) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(
            f"Cannot use {option}={value}.",
            "The schedule falls to that share of the learning rate, so it must lie between 0 and 1.",
            "Correct it in lr_scheduler_kwargs, or change learning_rate.",
            **{option: value},
        )
    return value
