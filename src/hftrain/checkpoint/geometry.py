"""The position and remaining steps of a run resumed with another batch size, accumulation or number of processes.

The position is counted in samples of the epoch's order. If no batch of the new size starts there, the rest of that
epoch is cut into batches from exactly that sample on, and later epochs from their start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hftrain.core.errors import CheckpointError
from hftrain.core.progress import Progress

# Decide the order of the data, or the meaning of the optimizer's state: a difference is an error.
_FIXED = ("samples", "data_seed", "drop_last", "limits", "precision")
# Matter only within an epoch: an order that depends on the batch size, or on the random numbers of one process.
_FIXED_WITHIN = ("grouping", "seedable")
# A run may change these; a warning lists them.
_FREE = ("world_size", "batch_size", "accumulation", "precision")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGrid:
    """How a pass over the data is cut into batches.

    Units:
        round_size: samples of one micro-step, all ranks together (None: unknown, or not constant). accumulation:
        micro-steps per update. num_batches: micro-steps of a pass (None: unknown). num_samples: of a pass (None:
        unknown).
    """

    round_size: int | None
    accumulation: int
    num_batches: int | None
    num_samples: int | None

    @classmethod
    def of(cls, geometry: Mapping[str, Any], num_batches: int | None) -> BatchGrid:
        """Return the grid of a run, or of an Engine's loader, from the geometry in its checkpoints."""
        return cls(
            round_size=geometry.get("round_size"),
            accumulation=geometry.get("accumulation", 1),
            num_batches=num_batches,
            num_samples=geometry.get("samples"),
        )

    @property
    def steps_per_epoch(self) -> int:
        """Updates of a whole pass; its number of batches must be known."""
        return max(1, -(-(self.num_batches or 0) // self.accumulation))


def check_equal(saved: Mapping[str, Any], current: Mapping[str, Any], *, step: int) -> None:
    """Raise `CheckpointError` if a run differs from that of the checkpoint in a value that must not change.

    Args:
        current: Values of this run, such as ``optimizer``.
    """
    differing = [
        f"{name}={value!r} (the checkpoint has {saved.get(name)!r})"
        for name, value in current.items()
        if name not in saved or saved[name] != value
    ]
    if differing:
        raise CheckpointError(
            f"Cannot resume from step {step} with {', '.join(differing)}.",
            "With that the position in the data is lost, or the optimizer's state means something else.",
            "Resume with the values of the checkpoint, or start a new run from its weights.",
        )


def check_resumable(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, is_within_epoch: bool, step: int
) -> list[str]:
    """Raise `CheckpointError` if a run cannot continue where the checkpoint was saved; return what else has changed.

    Args:
        current: The ``geometry`` of this run; missing entries are not compared.
        is_within_epoch: Whether the checkpoint was saved in the middle of an epoch.

    Returns:
        Allowed differences, such as ``"batch_size 2 -> 4"``.
    """
    fixed = [*_FIXED, *(_FIXED_WITHIN if is_within_epoch else ())]
    if saved.get("weights_dtype") is not None and saved["weights_dtype"] == current.get("weights_dtype"):
        # Only the arithmetic changes, not the weights and the optimizer's state.
        fixed.remove("precision")
    # In these cases, a position is only valid with the same number of ranks.
    alone = saved.get("own_shares") or current.get("own_shares") or current.get("seedable") is False
    fixed += ["world_size"] if is_within_epoch and alone else []
    is_countable = saved.get("round_size") and current.get("round_size")
    # A limit is a number of batches: with others, the rest of the pass would be other samples.
    if is_within_epoch and (not is_countable or saved.get("limits")):
        fixed += ["world_size", "batch_size"]
    assumed: dict[str, Any] = {**{name: current.get(name) for name in _FIXED_WITHIN}, "limits": {}}
    check_equal({**assumed, **saved}, {name: current[name] for name in fixed if name in current}, step=step)
    changed = [name for name in _FREE if name in current and saved.get(name) != current[name]]
    return [f"{name} {saved.get(name)} -> {current[name]}" for name in changed]


def convert_position(progress: Progress, saved: BatchGrid, current: BatchGrid) -> Progress:
    """Return the same position in another grid; `saved.num_batches` is that of the pass the position is in."""
    used = progress.micro_steps_in_epoch
    size, new_size = saved.round_size, current.round_size
    if not (size and new_size) or size == new_size or not progress.is_within_epoch:
        return progress
    samples = progress.offset_in_epoch + used * size
    # A pass may have more samples than the dataset.
    is_over = used >= saved.num_batches if saved.num_batches is not None else samples >= (saved.num_samples or math.inf)
    if is_over and current.num_batches is not None:
        return replace(progress, micro_steps_in_epoch=current.num_batches, offset_in_epoch=0)
    if is_over:
        return replace(progress, epoch=progress.epoch + 1, micro_steps_in_epoch=0, offset_in_epoch=0)
    used, offset = divmod(samples, new_size)
    return replace(progress, micro_steps_in_epoch=used, offset_in_epoch=offset)


def steps_left(progress: Progress, grid: BatchGrid, *, num_batches_first: int, num_steps: int) -> int:
    """Return how many updates a run needs from its position in `grid` to its planned end.

    Args:
        grid: How passes are cut; its number of batches must be known.
        num_batches_first: Micro-steps of the pass the position is in.
        num_steps: The updates of a whole run in this grid.
    """
    per_epoch, accumulation = grid.steps_per_epoch, grid.accumulation
    rest = num_steps - (progress.epoch + 1) * per_epoch
    left = num_batches_first - progress.micro_steps_in_epoch
    if rest < 0:
        # It ends within this pass: subtract the micro-steps beyond the end.
        beyond = num_batches_first - min(num_batches_first, (num_steps - progress.epoch * per_epoch) * accumulation)
        left, rest = left - beyond, 0
    return max(0, -(-left // accumulation)) + rest
