"""Speed metrics."""

from __future__ import annotations

import time


def speed_metrics(
    prefix: str,
    start_s: float,
    *,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Return runtime (seconds) and rates since `start_s`, a `time.perf_counter()` reading.

    Source: the documented `<prefix>_runtime`, `_samples_per_second`, `_steps_per_second`, `_tokens_per_second`.
    """
    runtime_s = time.perf_counter() - start_s
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    rates = {
        f"{prefix}_{name}_per_second": round(count / runtime_s, 3)
        for name, count in counts.items()
        if runtime_s > 0 and count is not None
    }
    return {f"{prefix}_runtime": round(runtime_s, 4), **rates}
