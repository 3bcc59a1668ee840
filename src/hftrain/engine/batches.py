"""One rank's batches and the read position in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hftrain.checkpoint.fitting import BatchGrid, check_resumable, convert_position
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.core.seed import capture_rng, draw_as_a_loader, preserved_rng, restore_rng
from hftrain.core.state import Progress
from hftrain.data.datasets import has_length
from hftrain.data.feed import TrainFeed
from hftrain.data.sharding import ShardPlan, end_workers
from hftrain.data.states import has_own_shares, resumable_loader, samples_per_round
from hftrain.strategies.base import Strategy

logger = get_logger(__name__)


class ShardedBatches:
    """Iterate one rank's share of a loader on its device, from the position of the last iteration or a checkpoint.

    In training, an iteration reads the rest of the current epoch and then increments `epoch`. After a ``break`` the
    next iteration continues with the following batch.

    Args:
        loader: The user's loader, the same on all ranks.
        strategy: A launched strategy.
        seed: Seeds the order; epoch e is shuffled with `seed + e`.
        is_training: Whether the position is kept and all shares have equal length. Otherwise each iteration reads
            the whole share, and no sample is read twice.

    Raises:
        ConfigError: The loader cannot be split, or ranks would get different numbers of training batches. Collective.
    """

    def __init__(self, loader: Any, *, strategy: Strategy, seed: int, is_training: bool) -> None:
        data = strategy.data
        plan = ShardPlan(rank=data.rank, world_size=data.world_size, is_training=is_training, seed=seed, ranks=data)
        self._loader = resumable_loader(plan.share(loader), seed=seed, rank=data.rank)
        self._feed = TrainFeed(self._loader, seed=seed)
        self._strategy, self._seed, self._is_training = strategy, seed, is_training
        self._progress, self._epoch_rng = Progress(), dict[str, Any]()
        counts = strategy.gather_object(self._feed.num_batches) if is_training else []
        if len(set(counts)) > 1:
            raise ConfigError(
                "Cannot train on different numbers of batches:",
                "a rank that has run out would leave the others waiting for its gradients.",
                "Give every rank as many, or pass the whole loader, which shard() splits evenly.",
                batches_by_rank=counts,
            )

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._progress.epoch

    def __len__(self) -> int:
        """Return this rank's number of batches per epoch; raises `TypeError` if the loader has no length."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        progress, to_device = self._progress, self._strategy.to_device
        if not self._is_training:
            num_read = 0
            for batch in self._feed.open(0):
                num_read += 1
                yield to_device(batch)
            self._check_pass(num_read)
            return
        is_empty = not progress.is_within_epoch
        for batch in self._open():
            is_empty = False
            progress.micro_steps_in_epoch += 1
            yield to_device(batch)
        if is_empty:
            raise ConfigError(
                f"Cannot train on epoch {progress.epoch}:",
                "its data gave no batch.",
                "Pass data that is not empty and can be iterated once per epoch (a generator cannot).",
            )
        self._check_pass(progress.micro_steps_in_epoch)
        self._progress.load_state_dict({"epoch": progress.epoch + 1, "micro_steps_in_epoch": 0, "offset_in_epoch": 0})

    def _check_pass(self, num_read: int) -> None:
        num_batches = self._feed.num_batches
        if num_batches not in (None, num_read):
            extra("shares").check_pass(self._loader, num_read, num_batches, is_training=False)

    def _open(self) -> Iterator[Any]:
        progress = self._progress
        if not progress.is_within_epoch:
            self._epoch_rng = capture_rng()
            draw_as_a_loader()
            return self._feed.open(progress.epoch)
        with preserved_rng():
            # A sampler may draw the epoch's order from the global generators.
            restore_rng(self._epoch_rng)
            draw_as_a_loader()
            skip, offset = progress.micro_steps_in_epoch, progress.offset_in_epoch
            return self._feed.open(progress.epoch, skip=skip, offset=offset)

    def close(self) -> None:
        """Stop the workers and restore a dataset whose state was loaded."""
        self._feed.close()
        end_workers(self._loader)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the position, which is the same on all ranks, and the settings that it depends on."""
        return {"progress": self._progress.state_dict(), "shape": self._geometry()}

    def own_state(self) -> dict[str, Any]:
        """Return the state that differs by rank."""
        return {"epoch_rng": self._epoch_rng, "data": self._feed.state_dict()}

    def restore(self, facts: dict[str, Any], rank_state: dict[str, Any], *, step: int) -> None:
        """Continue from a checkpoint's position; it may have been saved by a different number of ranks.

        Raises:
            CheckpointError: The position cannot be mapped to this loader.
        """
        saved, geometry, progress = facts["shape"], self._geometry(), Progress(**facts["progress"])
        changes = check_resumable(saved, geometry, is_within_epoch=progress.is_within_epoch, step=step)
        if changes:
            logger.warning("The batch layout has changed (%s); the position in the data is kept.", ", ".join(changes))
        self._progress = convert_position(
            progress, *(BatchGrid.of(shape, shape["num_batches"]) for shape in (saved, geometry))
        )
        self._epoch_rng = rank_state["epoch_rng"]
        with preserved_rng():  # report invalid states now instead of in the next iteration
            restore_rng(self._epoch_rng or capture_rng())
        # Each rank that reads a stream may have been at a different position in it.
        self._feed.load_state_dict(None if changes and self._feed.is_stream else rank_state["data"])

    def _geometry(self) -> dict[str, Any]:
        world_size = self._strategy.data.world_size
        dataset: Any = getattr(self._loader, "dataset", None)
        return {
            "world_size": world_size,
            "batch_size": getattr(self._loader, "batch_size", None),
            "round_size": samples_per_round(self._loader, world_size=world_size),
            "num_batches": self._feed.num_batches,
            "samples": len(dataset) if has_length(dataset) else None,
            "data_seed": self._seed,
            "drop_last": getattr(self._loader, "drop_last", None),
            "own_shares": has_own_shares(self._loader, world_size=world_size),
        }
