"""Loader workers that draw on from one seed per epoch, as with transformers' Trainer, and still resume exactly."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hftrain.core.errors import check_known
from hftrain.core.seed import plain_rng, restore_rng, rng_now
from hftrain.data.datasets import has_state, tell_epoch
from hftrain.data.seeding import SeededBatches, start_worker
from hftrain.data.sharding import is_plain_loader, on_reader, rebuild_loader

WORKER_SEEDS = ("batch", "epoch")


def check_worker_seeds(value: str) -> str:
    """Return the Trainer's argument; raise `ConfigError` if it has no such value."""
    check_known(value, WORKER_SEEDS, f"Cannot use worker_seeds={value!r}.", "")
    return value


class DrawingOn(Dataset[Any]):
    """Map-style data whose state holds the generators of its worker, which then reads its next batches as before."""

    draws_on = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = dataset.__getitems__

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch."""
        tell_epoch(self.dataset, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the random numbers, and the state of the dataset inside if it has one."""
        inner = self.dataset.state_dict() if has_state(self.dataset) else None
        return {"numbers": plain_rng(rng_now(())), "dataset": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them, in the worker."""
        restore_rng(state["numbers"])
        if state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])


def drawing_on(loader: Any, *, rank: int) -> Any:
    """Make the workers of a map-style loader draw on, each from the seed that torch and transformers give it.

    Its generator is torch's global one, from which the seed of a pass is then drawn, as there. A `worker_init_fn` of
    the user's is kept.
    """
    return on_reader(loader, partial(_drawing_on, rank=rank))


def _drawing_on(loader: Any, *, rank: int) -> Any:
    if not is_plain_loader(loader) or not loader.num_workers or isinstance(loader.dataset, IterableDataset):
        return loader
    batches, start = loader.batch_sampler, loader.worker_init_fn
    order = batches.batch_sampler if isinstance(batches, SeededBatches) else None
    if isinstance(start, partial) and start.func is start_worker:
        start = partial(start_worker, rank=rank, num_workers=loader.num_workers)
    return rebuild_loader(loader, dataset=DrawingOn(loader.dataset), worker_init_fn=start, generator=None, order=order)
