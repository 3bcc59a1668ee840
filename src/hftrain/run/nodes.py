"""Runs on several machines that each keep checkpoints on their own storage (`save_on_each_node`)."""

from __future__ import annotations

from pathlib import Path

from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.foreign import check_foreign
from hftrain.checkpoint.layout import TRAINER_STATE
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.core.errors import CheckpointError
from hftrain.strategies.base import Strategy


def own_checkpoint(args: TrainingArguments, strategy: Strategy, output_dir: Path, folder: Path) -> Path:
    """Return the path on this machine of the checkpoint that the main process resumes from. Collective.

    Raises:
        CheckpointError: On a machine that keeps its own checkpoints, this one is missing or damaged.
    """
    if not args.save_on_each_node:
        return folder
    inside = output_dir / folder.name
    own = inside if (inside / TRAINER_STATE).is_file() else folder
    cause: CheckpointError | None = None
    if strategy.is_local_main:
        try:
            if CheckpointManager.open(own) is None:
                check_foreign(own)
        except CheckpointError as error:
            cause = error
    if not strategy.all_true(cause is None):
        elsewhere = "It is missing on another machine; see the error there."
        reason = elsewhere if cause is None else f"It is missing on this machine: {cause}"
        raise CheckpointError(
            f"Cannot resume from {folder.name} with save_on_each_node=True.",
            reason,
            "Name a checkpoint that all machines hold, or copy it to each of them.",
        ) from cause
    return own
