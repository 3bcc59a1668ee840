"""Checkpoints that several processes write, each its part, and that another number of processes may read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hftrain.checkpoint.fitting import misfit
from hftrain.checkpoint.layout import OPTIMIZER_SHARDS, WEIGHT_SHARDS
from hftrain.checkpoint.parts import load_rng
from hftrain.checkpoint.ranks import share_out
from hftrain.core.log import get_logger
from hftrain.storage.shards import save_shards
from hftrain.trainer.capture import Keep, as_it_is

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)


def shard_writers(
    trainer: Trainer, optimizer: torch.optim.Optimizer, keep: Keep = as_it_is
) -> list[Callable[[Path], None]]:
    """Return what writes this process's pieces of model and optimizer; nothing where they are saved whole.

    Args:
        trainer: Whose model.
        optimizer: Its optimizer.
        keep: Copies tensors to host memory, where they are written later.
    """
    strategy = trainer.strategy
    place = {"rank": strategy.rank, "world_size": strategy.world_size}
    weights = strategy.model_shards(trainer.model_wrapped)
    writers: list[Callable[[Path], None]] = []
    if weights is not None:
        kept = keep(weights)
        writers.append(lambda folder: save_shards(kept, folder, stem=WEIGHT_SHARDS, **place))
    split = None if trainer.args.save_only_model else strategy.optimizer_shards(trainer.model_wrapped, optimizer)
    if split is not None:
        pieces = keep(split[1])
        writers.append(lambda folder: save_shards(pieces, folder, stem=OPTIMIZER_SHARDS, **place))
    return writers


def load_own(trainer: Trainer, folder: Path, *, num_saved: int) -> dict[str, Any]:
    """Read what differs by process; another number of processes than now, `num_saved`, may have saved it."""
    strategy = trainer.strategy
    if num_saved == strategy.world_size:
        return load_rng(folder, rank=strategy.rank, world_size=strategy.world_size)
    logger.warning(
        "%s was saved by %d processes and goes on with %d: random numbers (dropout) come out differently.",
        *(folder, num_saved, strategy.world_size),
    )
    states = [load_rng(folder, rank=rank, world_size=num_saved) for rank in range(num_saved)]
    return share_out(states, rank=strategy.rank)


def check_engine(trainer: Trainer, state: dict[str, Any], path: Path) -> None:
    """Refuse an optimizer's state that DeepSpeed split where another strategy would have to put it together.

    Raises:
        CheckpointError: So it is.
    """
    if "deepspeed" in state and not trainer.is_deepspeed_enabled:
        raise misfit(path, "DeepSpeed split it in a way of its own, and the run does not use DeepSpeed")
