"""What a step boundary had left to do when its checkpoint was taken, for the resumed run to do first.

A checkpoint that a signal asks for does not wait for an evaluation that is due at the same boundary. One that is due at
a run's last step comes before what is due at the end of the last epoch, and no further step would lead there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.progress import Progress, TrainerControl

EVALUATE, SAVE, END_EPOCH, END_RUN = _KNOWN = ("evaluate", "save", "end_epoch", "end_run")


def to_do(control: TrainerControl, progress: Progress, *, max_steps: int, is_within_epoch: bool) -> list[str]:
    """Return what callbacks have asked for at this boundary, or the end of the run brings, and is not done yet."""
    is_due = {
        EVALUATE: control.should_evaluate,
        # Alone it is what this very checkpoint does.
        SAVE: control.should_evaluate and control.should_save,
        END_EPOCH: control.should_epoch_stop and progress.micro_steps_in_epoch > 0,
        END_RUN: is_within_epoch and progress.step >= max_steps,
    }
    return [name for name in _KNOWN if is_due[name]]


def left_in(facts: Mapping[str, Any]) -> frozenset[str]:
    """Return what a checkpoint's manifest says is left to do."""
    left = facts.get("left")
    return frozenset(name for name in _KNOWN if isinstance(left, list) and name in left)
