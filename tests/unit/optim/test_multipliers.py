"""Schedules as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from hftrain.optim import multipliers as m

RUN = {"warmup": 4, "total": 12}
ROOT_HALF = math.sqrt(0.5)
STAGES = {"warmup": 4, "stable": 2, "decay": 4, "min_rate": 0.2}


@pytest.mark.parametrize(
    ("multiplier", "expected"),
    [
        (m.constant, {0: 1, 5: 1, 50: 1}),
        (partial(m.constant_with_warmup, warmup=4), {0: 0, 1: 0.25, 4: 1, 50: 1}),
        (partial(m.linear, **RUN), {0: 0, 3: 0.75, 4: 1, 6: 0.75, 12: 0, 20: 0}),
        (partial(m.linear, warmup=0, total=4), {0: 1, 1: 0.75}),
        (partial(m.cosine, **RUN), {0: 0, 2: 0.5, 4: 1, 6: (1 + ROOT_HALF) / 2, 8: 0.5, 12: 0}),
        (partial(m.cosine, **RUN, num_cycles=1), {4: 1, 6: 0.5, 8: 0, 12: 1}),
        (partial(m.cosine_with_min_lr, **RUN, min_rate=0.2), {0: 0, 2: 0.5, 4: 1, 8: 0.6, 12: 0.2}),
        (partial(m.cosine_warmup_with_min_lr, **RUN, min_rate=0.2), {0: 0.25, 3: 1, 7: 0.6, 11: 0.2}),
        (
            partial(m.cosine_warmup_with_min_lr, **RUN, min_rate=0.2, warmup_lr_rate=0.4),
            {0: 0.4, 1: 0.6, 3: 1, 11: 0.2},
        ),
        (partial(m.cosine_warmup_with_min_lr, warmup=1, total=3, min_rate=0.0, warmup_lr_rate=0.4), {0: 0.4, 2: 0}),
        (partial(m.cosine_with_restarts, **RUN), {0: 0, 2: 0.5, 4: 1, 8: 0.5, 12: 0, 13: 0}),
        (partial(m.cosine_with_restarts, **RUN, num_cycles=2), {4: 1, 6: 0.5, 8: 1, 10: 0.5, 12: 0}),
        (partial(m.polynomial, **RUN, end_rate=0.2), {0: 0, 2: 0.5, 4: 1, 8: 0.6, 12: 0.2, 20: 0.2}),
        (partial(m.polynomial, **RUN, end_rate=0.2, power=2.0), {4: 1, 8: 0.4, 12: 0.2}),
        (partial(m.inverse_sqrt, warmup=4), {0: 0, 2: 0.5, 4: 1, 16: 0.5}),
        (partial(m.inverse_sqrt, warmup=4, timescale=1), {4: 1, 7: 0.5}),
        (partial(m.inverse_sqrt, warmup=0), {0: 1, 30_000: 0.5}),
        (
            partial(m.warmup_stable_decay, **STAGES, warmup_type="linear", decay_type="cosine"),
            {0: 0.2, 2: 0.6, 4: 1, 5: 1, 6: 1, 8: 0.6, 10: 0.2, 11: 0.2},
        ),
        (
            partial(m.warmup_stable_decay, **STAGES, warmup_type="cosine", decay_type="linear"),
            {1: 0.2 + 0.4 * (1 - ROOT_HALF), 2: 0.6, 7: 0.8},
        ),
        (
            partial(m.warmup_stable_decay, **STAGES, warmup_type="1-sqrt", decay_type="1-sqrt"),
            {0: 0.2, 3: 0.6, 4: 1, 6: 1, 7: 0.6, 10: 0.2},
        ),
    ],
)
def test_multiplier_has_the_closed_form_values(multiplier: Callable[[int], float], expected: dict[int, float]) -> None:
    assert {step: multiplier(step) for step in expected} == pytest.approx(expected, abs=1e-12)
