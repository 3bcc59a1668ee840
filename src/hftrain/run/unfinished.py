"""Actions that were still due at a step boundary when its checkpoint was saved; the resumed run does them first.

A checkpoint requested by a signal does not wait for an evaluation that is due at the same boundary. A checkpoint of a
run's last step comes before the actions at the end of the last epoch, and no further step would trigger them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.progress import Progress, TrainerControl

EVALUATE, SAVE, END_EPOCH, END_RUN = _KNOWN = ("evaluate", "save", "end_epoch", "end_run")


def to_do(control: TrainerControl, progress: Progress, *, max_steps: int, is_within_epoch: bool) -> list[str]:
    """Return the actions that callbacks, or the end of the run, require at this boundary and are not done yet."""
    is_due = {
        EVALUATE: control.should_evaluate,
        # This checkpoint completes a save that was requested without an evaluation.
        SAVE: control.should_evaluate and control.should_save,
        END_EPOCH: control.should_epoch_stop and progress.micro_steps_in_epoch > 0,
        END_RUN: is_within_epoch and progress.step >= max_steps,
    }
    return [name for name in _KNOWN if is_due[name]]


def left_in(facts: Mapping[str, Any]) -> frozenset[str]:
    """Return the actions that are still due according to a checkpoint's manifest."""
    left = facts.get("left")
    return frozenset(name for name in _KNOWN if isinstance(left, list) and name in left)
