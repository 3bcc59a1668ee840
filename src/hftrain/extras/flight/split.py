"""Where the time of the last steps went on each rank, and which rank the others waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

from hftrain.extras.flight.reading import read_ledger, read_sessions

# In the order from one exchange of gradients, in a backward pass, to the next one.
_PHASE_ORDER = ("step", "between", "data", "forward")
PHASES = ("data", "forward", "backward", "step", "between")
_MOST_STEPS, _FEWEST_STEPS = 100, 10
# A rank is late if by more than a tenth of the step, and stands out if it is in three of four steps.
_LATE, _OFTEN = 0.1, 0.75
_Step = Sequence[Mapping[str, float]]


def read_split(run: str | Path) -> dict[str, Any] | None:
    """Return where the time of the last 100 steps went that all ranks wrote; None if there are none.

    ``steps`` is their number and ``ms`` has for each rank the mean milliseconds of its phases on the host; ``between``
    is what it spends more between steps than the fastest rank. ``waited`` is None if no rank stands out, otherwise it
    has the ``rank``, in how many ``steps`` it came last, the ``phase`` in which it differs most, and the milliseconds
    there: its own mean, and the median of the ``others``.
    """
    num_ranks = [session.get("world_size") for session in read_sessions(run)][-1:]
    timings = [[line.get("ms", {}) for line in lines] for lines in read_ledger(run).values()]
    complete = [step for step in timings if [len(step)] == num_ranks and all(step)]
    steps = [_with_waiting(step) for step in complete[-_MOST_STEPS:]]
    if not steps:
        return None
    means = [{name: mean(ms[name] for ms in rank) for name in PHASES} for rank in zip(*steps, strict=True)]
    latest, count = Counter(map(_latest_rank, steps)).most_common(1)[0]
    waited = None
    if latest is not None and len(steps) >= _FEWEST_STEPS and count >= _OFTEN * len(steps):
        others = {name: _median_of_others([ms[name] for ms in means], latest) for name in _PHASE_ORDER}
        phase = max(_PHASE_ORDER, key=lambda name: means[latest][name] - others[name])
        waited = {"rank": latest, "steps": count, "phase": phase, "ms": means[latest][phase], "others": others[phase]}
    return {"steps": len(steps), "ms": means, "waited": waited}


def _with_waiting(step: _Step) -> _Step:
    """Add the time between steps: ranks that wait for each other take equally long for all of it."""
    totals = [sum(phases.values()) for phases in step]
    return [{**phases, "between": max(totals) - total} for phases, total in zip(step, totals, strict=True)]


def _latest_rank(step: _Step) -> int | None:
    """Return the rank that came last to some place on the way; None if no rank is late."""
    places = list(zip(*(accumulate([phases[name] for name in _PHASE_ORDER]) for phases in step), strict=True))
    late = [max(place[rank] - _median_of_others(place, rank) for place in places) for rank in range(len(step))]
    return late.index(max(late)) if max(late) > _LATE * sum(step[0].values()) else None


def _median_of_others(values: Sequence[float], rank: int) -> float:
    return median([*values[:rank], *values[rank + 1 :]] or values)
