"""Loaders made as a Trainer makes them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hftrain.data.loaders import build_loader, default_train_sampler
from hftrain.data.sharding import ShardPlan

_PLAN = ("rank", "world_size", "is_training", "seed", "even_batches", "split_batches", "dispatch_batches")


def build(dataset: Any, *, collate: Any = list, sampler: Any = None, **options: Any) -> Any:
    """Build a loader; `options` are those of the loader, its order and `ShardPlan`."""
    plan = ShardPlan(**{name: options.pop(name) for name in _PLAN if name in options})
    order = {name: options.pop(name) for name in ("shuffle", "use_seedable_sampler") if name in options}
    if sampler is None and plan.is_training and not isinstance(dataset, IterableDataset):
        sampler = default_train_sampler(dataset, plan, **order)
    return build_loader(dataset, plan, collate=collate, sampler=sampler, **options)


def stream_share(
    dataset: Any, *, batch_size: int = 2, drop_last: bool = False, num_workers: int = 0, **plan: Any
) -> Any:
    """Return what one rank reads of a stream in batches of 2; `plan` are the options of `ShardPlan`."""
    loader = DataLoader(dataset, batch_size=2, drop_last=drop_last, num_workers=num_workers)
    return ShardPlan(**plan).share(loader).dataset
