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
from hftrain.core.state import Progress

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
    differences = [
        f"{name}={value!r} (the checkpoint has {saved.get(name)!r})"
        for name, value in current.items()
        if name not in saved or saved[name] != value
    ]
    if differences:
        raise CheckpointError(
            f"Cannot resume from step {step} with {', '.join(differences)}.",
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
    names = [*_FIXED, *(_FIXED_WITHIN if is_within_epoch else ())]
    if saved.get("weights_dtype") is not None and saved["weights_dtype"] == current.get("weights_dtype"):
        # Only the arithmetic changes, not the weights and the optimizer's state.
        names.remove("precision")
    # In these cases, a position is only valid with the same number of ranks.
    is_per_rank = saved.get("own_shares") or current.get("own_shares") or current.get("seedable") is False
    names += ["world_size"] if is_within_epoch and is_per_rank else []
    is_countable = saved.get("round_size") and current.get("round_size")
    # A limit is a number of batches: with others, the rest of the pass would be other samples.
    if is_within_epoch and (not is_countable or saved.get("limits")):
        names += ["world_size", "batch_size"]
    defaults: dict[str, Any] = {**{name: current.get(name) for name in _FIXED_WITHIN}, "limits": {}}
    check_equal({**defaults, **saved}, {name: current[name] for name in names if name in current}, step=step)
    changes = [name for name in _FREE if name in current and saved.get(name) != current[name]]
    return [f"{name} {saved.get(name)} -> {current[name]}" for name in changes]


def convert_position(progress: Progress, saved: BatchGrid, current: BatchGrid) -> Progress:
    """Return the same position in another grid; `saved.num_batches` is that of the pass the position is in."""
    micro_steps = progress.micro_steps_in_epoch
    old_round, new_round = saved.round_size, current.round_size
    if not (old_round and new_round) or old_round == new_round or not progress.is_within_epoch:
        return progress
    samples = progress.offset_in_epoch + micro_steps * old_round
    # A pass may have more samples than the dataset.
    num_samples = saved.num_samples or math.inf
    is_over = micro_steps >= saved.num_batches if saved.num_batches is not None else samples >= num_samples
    if is_over and current.num_batches is not None:
        return replace(progress, micro_steps_in_epoch=current.num_batches, offset_in_epoch=0)
    if is_over:
        return replace(progress, epoch=progress.epoch + 1, micro_steps_in_epoch=0, offset_in_epoch=0)
    micro_steps, offset = divmod(samples, new_round)
    return replace(progress, micro_steps_in_epoch=micro_steps, offset_in_epoch=offset)


def steps_left(progress: Progress, grid: BatchGrid, *, num_batches_first: int, num_steps: int) -> int:
    """Return how many updates a run needs from its position in `grid` to its planned end.

    Args:
        grid: How passes are cut; its number of batches must be known.
        num_batches_first: Micro-steps of the pass the position is in.
        num_steps: The updates of a whole run in this grid.
    """
    per_epoch, accumulation = grid.steps_per_epoch, grid.accumulation
    num_later = num_steps - (progress.epoch + 1) * per_epoch
    num_batches = num_batches_first - progress.micro_steps_in_epoch
    if num_later < 0:
        # It ends within this pass: subtract the micro-steps beyond the end.
        excess = num_batches_first - min(num_batches_first, (num_steps - progress.epoch * per_epoch) * accumulation)
        num_batches, num_later = num_batches - excess, 0
    return max(0, -(-num_batches // accumulation)) + num_later
