"""What a step boundary had left to do when its checkpoint was taken, for the resumed run to do first.

A checkpoint that a signal asks for does not wait for an evaluation that is due at the same boundary.
"""

from __future__ import annotations

from pathlib import Path

from hftrain.checkpoint.layout import MANIFEST
from hftrain.checkpoint.manifest import read_manifest
from hftrain.core.progress import Progress, TrainerControl

EVALUATE, SAVE, END_EPOCH = _KNOWN = ("evaluate", "save", "end_epoch")


def to_do(control: TrainerControl, progress: Progress) -> list[str]:
    """Return what callbacks have asked for at this boundary and is not done yet."""
    is_due = {
        EVALUATE: control.should_evaluate,
        # Alone it is what this very checkpoint does.
        SAVE: control.should_evaluate and control.should_save,
        END_EPOCH: control.should_epoch_stop and progress.micro_steps_in_epoch > 0,
    }
    return [name for name in _KNOWN if is_due[name]]


def left_in(folder: Path) -> frozenset[str]:
    """Return what a checkpoint's manifest says is left to do; nothing for a checkpoint without one."""
    left = read_manifest(folder).facts.get("left") if (folder / MANIFEST).exists() else None
    return frozenset(name for name in _KNOWN if isinstance(left, list) and name in left)
