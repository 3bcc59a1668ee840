"""A strategy's state on disk: each process writes its part, and any number of processes can read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.fitting import check_optimizer, check_state, group_settings, keep_choices, misfit, restoring
from hftrain.checkpoint.layout import OPTIMIZER, OPTIMIZER_SHARDS, SCALER, WEIGHT_SHARDS
from hftrain.checkpoint.ranks import share_out
from hftrain.checkpoint.state_files import load_optimizer, load_part, load_rng
from hftrain.core.log import get_logger
from hftrain.precision.base import Precision
from hftrain.storage.shards import save_shards
from hftrain.strategies.base import Strategy

Keep = Callable[[Any], Any]

logger = get_logger(__name__)


def as_it_is(tree: Any) -> Any:
    """Return the structure itself, uncopied, because it is written at once."""
    return tree


def shard_writers(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer | None, keep: Keep = as_it_is
) -> list[Callable[[Path], None]]:
    """Return functions that write this process's shards of model and optimizer; none if they are saved whole.

    Args:
        model: As the strategy wrapped it.
        optimizer: None to leave its state out.
        keep: Copies tensors to host memory, if they are written later.
    """
    place = {"rank": strategy.rank, "world_size": strategy.world_size}
    weights = strategy.model_shards(model)
    writers: list[Callable[[Path], None]] = []
    if weights is not None:
        kept = keep(weights)
        writers.append(lambda folder: save_shards(kept, folder, stem=WEIGHT_SHARDS, **place))
    split = None if optimizer is None else strategy.optimizer_shards(model, optimizer)
    if split is not None:
        pieces = keep(split[1])
        writers.append(lambda folder: save_shards(pieces, folder, stem=OPTIMIZER_SHARDS, **place))
    return writers


def load_own(folder: Path, *, rank: int, world_size: int, num_saved: int) -> dict[str, Any]:
    """Read the per-process state, which `num_saved` processes have saved; may differ from `world_size`."""
    if num_saved == world_size:
        return load_rng(folder, rank=rank, world_size=world_size)
    logger.warning(
        "%s was saved by %d processes and resumes on %d: random numbers (dropout) will differ.",
        *(folder, num_saved, world_size),
    )
    states = [load_rng(folder, rank=each, world_size=num_saved) for each in range(num_saved)]
    return share_out(states, rank=rank)


def whole_state(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the part of an optimizer's state that the main process writes; see `shard_writers`. Collective."""
    split = strategy.optimizer_shards(model, optimizer)
    return split[0] if split else strategy.optimizer_state(model, optimizer)


def restore_optimizer(
    folder: Path,
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
) -> None:
    """Load an optimizer's state after calling `check` on it. Collective; mutates the optimizer.

    Raises:
        CheckpointError: The state is missing, damaged, or does not fit.
    """
    before, state = group_settings(optimizer), load_optimizer(folder)
    check(state)
    with restoring(folder / OPTIMIZER):
        strategy.load_optimizer_state(model, optimizer, keep_choices(state, before))
    check_optimizer(folder / OPTIMIZER, optimizer, before=before)


def restore_scaler(folder: Path, precision: Precision) -> None:
    """Load the loss scale, if the precision has one; mutates it."""
    if precision.state_dict():
        state = load_part(folder, SCALER)
        check_state(folder / SCALER, state, precision, own=precision.state_dict())
        with restoring(folder / SCALER):
            precision.load_state_dict(state)


def check_engine(state: dict[str, Any], path: Path, *, is_deepspeed: bool) -> None:
    """Raise for an optimizer's state that DeepSpeed has split if this strategy cannot merge it."""
    if "deepspeed" in state and not is_deepspeed:
        raise misfit(path, "DeepSpeed partitioned it, and the run does not use DeepSpeed")
