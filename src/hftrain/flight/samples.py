"""Which samples of map-style data a batch has, and leaving some of them out."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.data.datasets import has_length
from hftrain.data.samplers import pick
from hftrain.data.seeding import SeededBatches
from hftrain.data.sharding import RankLoader, rebuild_loader


class OpenBatches(Sampler[list[Any]]):
    """Another batch sampler, of which each batch is noted with its position in the pass, without excluded samples.

    The other samples stay in their batches. A batch with nothing left gets the next sample of the dataset that is not
    excluded, so that every process still has a batch.
    """

    passes_batches_on = True

    def __init__(self, batch_sampler: Any, *, dataset: Any, excluded: frozenset[int] = frozenset()) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.noted: deque[tuple[int, list[Any]]] | None = None
        self._dataset, self._excluded = dataset, excluded

    def __iter__(self) -> Iterator[list[Any]]:
        return self._pass_on(self.batch_sampler, 0)

    def begin(self, start: int) -> Iterator[list[Any]] | None:
        """Iterate from a position; None if the batches before it must be drawn too."""
        batches = pick(self.batch_sampler, (start, None))
        return None if batches is None else self._pass_on(batches, start)

    def _pass_on(self, batches: Iterable[list[Any]], start: int) -> Iterator[list[Any]]:
        if self.noted is not None:
            self.noted.clear()
        for position, batch in enumerate(batches, start):
            if self._excluded and not all(isinstance(each, Integral) for each in batch):
                raise ConfigError(
                    f"Cannot leave samples out of a batch of {batch!r:.100}.",
                    "exclude_samples has numbers, and this data names its samples otherwise, as a Mixture by pairs.",
                    "Leave them out of the datasets themselves.",
                )
            left = [each for each in batch if each not in self._excluded] if self._excluded else batch
            left = left or [self._next_after(batch[0])]
            if self.noted is not None:
                self.noted.append((position, list(left)))
            yield left

    def _next_after(self, index: int) -> int:
        num = len(self._dataset)
        following = ((index + step) % num for step in range(1, num))
        return next(other for other in following if other not in self._excluded)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def opened(loader: Any, *, excluded: frozenset[int] = frozenset()) -> Any:
    """Return a loader whose batches go through an `OpenBatches`; None if they are not known by their indices.

    Known are those of hftrain's own loaders of map-style data.
    """
    if (
        not isinstance(loader, RankLoader)
        or loader.batch_sampler is None
        or isinstance(loader.dataset, IterableDataset)
    ):
        return None
    order: Any = loader.batch_sampler
    options: dict[str, Any] = {"dataset": loader.dataset, "excluded": excluded}
    if isinstance(order, SeededBatches):
        inner, order = OpenBatches(order.batch_sampler, **options), copy.copy(order)
        order.batch_sampler = inner
    else:
        order = OpenBatches(order, **options)
    return rebuild_loader(loader, order=order)


def open_batches_of(loader: Any) -> OpenBatches | None:
    """Return the outermost `OpenBatches` of a loader, None if it has none."""
    order = getattr(loader, "batch_sampler", None)
    order = order.batch_sampler if isinstance(order, SeededBatches) else order
    return order if isinstance(order, OpenBatches) else None


class NotedFeed:
    """A feed that knows the samples of the batches that it has given."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed
        self._given: deque[list[Any] | None] = deque()

    def __getattr__(self, name: str) -> Any:
        if name == "feed":
            raise AttributeError(name)
        return getattr(self.feed, name)

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """Return the pass's batches, see `Feed`."""
        order = open_batches_of(self.feed.loader)
        if order is not None:
            order.noted = deque()
        self._given.clear()
        return self._giving(self.feed.open(epoch, skip=skip, offset=offset), order, skip)

    def _giving(self, batches: Iterator[Any], order: Any, first: int) -> Iterator[Any]:
        for position, batch in enumerate(batches, first):
            samples = None
            while order is not None and order.noted and order.noted[0][0] <= position:
                place, found = order.noted.popleft()
                samples = found if place == position else None
            self._given.append(samples)
            yield batch

    def next_samples(self) -> list[Any] | None:
        """Return the samples of the batch that is trained on next."""
        return self._given.popleft() if self._given else None


class ExcludeSamples(TrainerCallback):
    """Leave samples of the training data out: ``Trainer(exclude_samples=[17, 42])``, or the path of a list in JSON.

    All other samples stay in their batches, in every pass, so a run resumed from before a sample's first use goes on
    as if the sample had never been there.

    Raises:
        ConfigError: The list cannot be read or names no sample, the processes have different ones, or the data is not
            map-style data that hftrain's own loader reads.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = _read(samples)

    def wrap_stepper(self, stepper: Any, *, strategy: Any, **_: Any) -> Any:
        """Compare the lists of all processes."""
        lists = strategy.gather_object(sorted(self.samples))
        if any(each != lists[0] for each in lists):
            raise ConfigError(
                "Cannot leave samples out.",
                f"The processes have different lists, of {', '.join(str(len(each)) for each in lists)} samples.",
                "Pass the same exclude_samples in every process.",
            )
        return stepper

    def wrap_loader(self, loader: Any) -> Any:
        """Return the loader without the samples."""
        changed = opened(loader, excluded=self.samples)
        if changed is None or not has_length(loader.dataset):
            raise ConfigError(
                f"Cannot use exclude_samples with a {type(loader).__name__} of a "
                f"{type(getattr(loader, 'dataset', None)).__name__}.",
                "Samples are known by their index in a map-style dataset that hftrain's own loader reads.",
                "Filter a stream itself; leave dispatch_batches out; or return the dataset's loader unchanged.",
            )
        num = len(loader.dataset)
        if unknown := sorted(each for each in self.samples if not 0 <= each < num):
            raise ConfigError(
                f"Cannot leave out sample {unknown[0]}.", f"The dataset has {num} samples.", "Correct exclude_samples."
            )
        if len(self.samples) >= num:
            raise ConfigError("Cannot leave out all samples.", "Nothing would be trained on.", "Shorten the list.")
        return changed


def _read(samples: Any) -> frozenset[int]:
    if isinstance(samples, (str, Path)):
        try:
            samples = json.loads(Path(samples).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Cannot read exclude_samples={str(samples)!r}.",
                f"{error}.",
                "Pass a JSON file with a list of indices.",
            ) from error
    if not isinstance(samples, (list, tuple, set, frozenset, range)) or not all(type(each) is int for each in samples):
        raise ConfigError(
            f"Cannot use exclude_samples={samples!r:.100}.", "It is not a list of whole numbers.", "Pass indices."
        )
    return frozenset(samples)
