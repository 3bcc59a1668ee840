"""Learning-rate schedules as pure functions: optimizer updates done -> multiplier of the base rate.

Legend: step s, warmup w, total T, all in optimizer updates; p = (s - w) / max(1, T - w) is the progress
after the warm-up. Unless a formula says otherwise, the warm-up is s / max(1, w) for s < w.
An argument with a default is a user's option; the others come from the run.
Source: the documented `lr_scheduler_type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

RISES: dict[str, Callable[[float], float]] = {
    "linear": lambda q: q,
    "cosine": lambda q: 0.5 * (1 - math.cos(math.pi * q)),
    "1-sqrt": lambda q: 1 - math.sqrt(1 - q),
}
"""Shapes of a rise from 0 to 1, q being the share of the way."""

FALLS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda q, num_cycles: 1 - q,
    "cosine": lambda q, num_cycles: _cosine_wave(q, num_cycles),
    "1-sqrt": lambda q, num_cycles: 1 - math.sqrt(q),
}
"""Shapes of a fall from 1 to 0; only the cosine reads `num_cycles`."""


def constant(step: int) -> float:
    """Return 1."""
    return 1.0


def constant_with_warmup(step: int, *, warmup: int) -> float:
    """Return 1 after the warm-up."""
    return _warmed_up(step, warmup) if step < warmup else 1.0


def linear(step: int, *, warmup: int, total: int) -> float:
    """Return max(0, (T - s) / max(1, T - w)) after the warm-up.

    Example:
        >>> [linear(step, warmup=2, total=6) for step in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return _warmed_up(step, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def cosine(step: int, *, warmup: int, total: int, num_cycles: float = 0.5) -> float:
    """Return (1 + cos(2 pi c p)) / 2 after the warm-up; c is `num_cycles`, half a wave by default.

    Source: Loshchilov and Hutter, 2017, arXiv 1608.03983, without restarts.
    """
    return cosine_with_min_lr(step, warmup=warmup, total=total, min_rate=0.0, num_cycles=num_cycles)


def cosine_with_min_lr(step: int, *, warmup: int, total: int, min_rate: float, num_cycles: float = 0.5) -> float:
    """Return r + (1 - r) (1 + cos(2 pi c p)) / 2 after the warm-up; r is `min_rate`."""
    if step < warmup:
        return _warmed_up(step, warmup)
    return _rescaled(_cosine_wave(_share(step, warmup, total), num_cycles), min_rate)


def cosine_warmup_with_min_lr(
    step: int,
    *,
    warmup: int,
    total: int,
    min_rate: float,
    num_cycles: float = 0.5,
    warmup_lr_rate: float | None = None,
) -> float:
    """Return `cosine_with_min_lr` one update ahead, so that no update has rate 0.

    Warm-up: (s + 1) / w; with a `warmup_lr_rate` u, u + (1 - u) s / max(1, w - 1).
    After it: r + (1 - r) (1 + cos(2 pi c p')) / 2 with p' = (s - w + 1) / max(1, T - w).
    """
    if step >= warmup:
        return _rescaled(_cosine_wave(_share(step + 1, warmup, total), num_cycles), min_rate)
    if warmup_lr_rate is None:
        return (step + 1) / warmup
    return _rescaled(step / max(1, warmup - 1), warmup_lr_rate)


def cosine_with_restarts(step: int, *, warmup: int, total: int, num_cycles: int = 1) -> float:
    """Return (1 + cos(pi ((c p) mod 1))) / 2 after the warm-up and 0 once p >= 1: c decays, each from 1.

    Source: Loshchilov and Hutter, 2017, arXiv 1608.03983.
    """
    if step < warmup:
        return _warmed_up(step, warmup)
    share = _share(step, warmup, total)
    return _cosine_wave((num_cycles * share) % 1.0, 0.5) if share < 1 else 0.0


def polynomial(step: int, *, warmup: int, total: int, end_rate: float, power: float = 1.0) -> float:
    """Return r + (1 - r) (1 - p)^power after the warm-up and r after T; r is `end_rate`."""
    if step < warmup:
        return _warmed_up(step, warmup)
    return _rescaled((1 - min(1.0, _share(step, warmup, total))) ** power, end_rate)


def inverse_sqrt(step: int, *, warmup: int, timescale: float | None = None) -> float:
    """Return 1 / sqrt((s - w + t) / t) after the warm-up; the timescale t is w by default, or 10000 without warm-up.

    Source: the schedule of Vaswani et al., 2017, arXiv 1706.03762, with a timescale independent of the warm-up.
    """
    if step < warmup:
        return _warmed_up(step, warmup)
    scale = timescale if timescale is not None else warmup or 10_000
    return 1 / math.sqrt((step - warmup + scale) / scale)


def warmup_stable_decay(
    step: int,
    *,
    warmup: int,
    stable: int,
    decay: int,
    warmup_type: str,
    decay_type: str,
    min_rate: float,
    num_cycles: float = 0.5,
) -> float:
    """Return a rise from r to 1 over w updates, 1 over the stable ones, a decay to r, then r; r is `min_rate`.

    The progress q of a stage is passed to `RISES` or `FALLS`; both are rescaled to [r, 1].
    Source: Hu et al., 2024, arXiv 2404.06395.
    """
    if step < warmup:
        return _rescaled(RISES[warmup_type](step / warmup), min_rate)
    if step < warmup + stable:
        return 1.0
    if step < warmup + stable + decay:
        return _rescaled(FALLS[decay_type]((step - warmup - stable) / decay, num_cycles), min_rate)
    return min_rate


def _warmed_up(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _share(step: int, warmup: int, total: int) -> float:
    return (step - warmup) / max(1, total - warmup)


def _cosine_wave(share: float, num_cycles: float) -> float:
    return 0.5 * (1 + math.cos(2 * math.pi * num_cycles * share))


def _rescaled(value: float, minimum: float) -> float:
    return minimum + (1 - minimum) * value
