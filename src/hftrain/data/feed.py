"""What the training loop reads: one iterator per epoch, from any place in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hftrain.core.log import get_logger
from hftrain.data.dispatch import DispatchLoader
from hftrain.data.offsets import with_offset
from hftrain.data.samplers import SkippedBatches, give_generator, samplers_of
from hftrain.data.seeding import new_generator
from hftrain.data.sharding import is_plain_loader, rebuild_loader
from hftrain.data.sizes import has_length
from hftrain.data.streams import set_dataset_epoch

_logger = get_logger(__name__)


class TrainFeed:
    """Open a training loader at any batch of any epoch, always with the same data there.

    Works with hftrain's loaders and with whatever iterable of batches a user's override returns. A torch loader or
    sampler that would draw from the global generator gets a generator of its own; mutates them.

    Args:
        loader: The loader of this rank.
        seed: The data seed.

    Example:
        >>> feed = TrainFeed([10, 11, 12], seed=0)
        >>> feed.num_batches, list(feed.open(0, skip=1))
        (3, [11, 12])
    """

    def __init__(self, loader: Iterable[Any], *, seed: int) -> None:
        self.loader = loader
        self._seed = seed
        if isinstance(loader, DispatchLoader):
            loader = loader.loader
        if isinstance(loader, DataLoader) and issubclass(type(loader), DataLoader):
            if loader.generator is None:
                loader.generator = new_generator(seed)
            give_generator(loader, seed=seed)

    @property
    def num_batches(self) -> int | None:
        """Batches in one epoch of this rank, or None where the loader cannot tell."""
        return len(self.loader) if has_length(self.loader) else None  # type: ignore[arg-type]

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """Start an epoch.

        Tells the epoch to whatever takes part in the loading and has `set_epoch`, and seeds every generator there
        with `seed + epoch`; mutates them. Workers that persist go on living, except that a skip starts others for
        this epoch.

        Args:
            epoch: Which pass, from 0.
            offset: Samples, of all ranks together, to leave out before the first batch is cut; see `with_offset`.
            skip: Batches to leave out at the start. For map-style data only their indices are drawn; those of a
                stream, or of a loader that iterates in its own way, are read and dropped before this returns.

        Returns:
            The iterator over the batches that remain, possibly none.
        """
        loader = with_offset(self.loader, offset) if offset else self.loader
        loader, to_drop = (loader, 0) if skip == 0 else _skip_indices(loader, skip)
        _start_epoch(loader, epoch=epoch, seed=self._seed)
        iterator = iter(loader)
        for sampler in samplers_of(loader) if skip else ():
            if isinstance(sampler, SkippedBatches):
                # Now, while the caller has put back the random numbers that the epoch's order was drawn from.
                sampler.start()
        if to_drop:
            _logger.info("Reading and dropping %d batches that were trained on before the checkpoint.", to_drop)
        for _, _batch in zip(range(to_drop), iterator, strict=False):
            pass
        return iterator


def _skip_indices(loader: Any, skip: int) -> tuple[Any, int]:
    """Return a loader that leaves batches out, and how many more have to be dropped by reading them."""
    is_map_style = not isinstance(getattr(loader, "dataset", None), IterableDataset)
    if isinstance(loader, DispatchLoader) and is_map_style and is_plain_loader(loader.loader):
        return loader.with_loader(_skip_indices(loader.loader, skip * loader.world_size)[0]), 0
    if is_plain_loader(loader) and is_map_style:
        # The one-off loader's workers must end with the epoch; those of the original wait for the next one.
        if loader.batch_sampler is None:
            batching = {"sampler": SkippedBatches(loader.sampler, skip=skip), "batch_size": None}
        else:
            batching = {"batch_sampler": SkippedBatches(loader.batch_sampler, skip=skip)}
        return rebuild_loader(loader, **batching, persistent_workers=False), 0
    if type(loader).__module__.startswith("accelerate.") and is_map_style:
        from accelerate.data_loader import skip_first_batches

        return skip_first_batches(loader, num_batches=skip), 0
    return loader, skip


def _start_epoch(loader: Any, *, epoch: int, seed: int) -> None:
    for part in (loader, *samplers_of(loader)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed + epoch)
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
    collate = getattr(loader, "collate_fn", None)
    if callable(getattr(collate, "set_epoch", None)):
        collate.set_epoch(epoch)  # type: ignore[union-attr]
    set_dataset_epoch(getattr(loader, "dataset", None), epoch=epoch, seed=seed)
