"""The training data of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hftrain.callbacks.runner import CallbackHandler
from hftrain.core.extras import extra
from hftrain.data.feed import TrainFeed
from hftrain.data.limits import Limits
from hftrain.data.samplers import is_rank_aware, samplers_of
from hftrain.data.sharding import end_workers
from hftrain.data.states import resumable_loader
from hftrain.strategies.base import Strategy


class RunData:
    """Open a run's training data. Collective.

    Args:
        open_loader: Returns this rank's batches, from another dataset if one is given.
        expects_save: Whether a checkpoint is planned for the end of the next step; see `TrainFeed`.

    Attributes:
        feed: The batches that the loop reads; a loop may replace them.
    """

    def __init__(
        self,
        open_loader: Callable[..., Any],
        strategy: Strategy,
        events: CallbackHandler,
        *,
        seed: int,
        limits: Limits,
        expects_save: Callable[[], bool],
    ) -> None:
        self._open_loader, self._strategy, self._events, self._seed = open_loader, strategy, events, seed
        self._limits, self._expects_save = limits, expects_save
        self.feed = self._open_feed()

    def replace(self, dataset: Any) -> TrainFeed:
        """Read another dataset from now on; collective."""
        former_feed, self.feed = self.feed, self._open_feed(dataset)
        self.feed.take_over(former_feed)
        self._events.refresh(train_dataloader=self.feed.loader)
        return self.feed

    def close(self) -> None:
        """Release the data."""
        # Persistent workers live as long as their loader, and torch's optimizers keep a frame that refers to it.
        end_workers(self.feed.loader)
        self.feed.close()

    def _open_feed(self, *dataset: Any) -> TrainFeed:
        strategy, seed = self._strategy, self._seed
        loader = self._open_loader(*dataset)
        for wrap in self._events.at_point("wrap_loader"):
            loader = wrap(loader)
        loader = resumable_loader(loader, seed=seed, rank=strategy.data.rank)
        if dataset:
            end_workers(self.feed.loader)
        limits = self._limits
        make_feed = partial(extra("limits").LimitedFeed, limits=limits) if limits.of_training else TrainFeed
        feed: TrainFeed = make_feed(loader, seed=seed, expects_save=self._expects_save)
        if strategy.world_size > 1:
            gathered = strategy.gather_object([strategy.data.rank, feed.own_seeds])
            main_seeds, feed.own_seeds = gathered[0][1], next(s for rank, s in gathered if rank == strategy.data.rank)
            # One order for the ranks that cut it into shares; a loader of this rank's own part keeps its own.
            if any(map(is_rank_aware, samplers_of(loader))):
                feed.own_seeds = [*main_seeds, *feed.own_seeds[len(main_seeds) :]]
        return feed
