"""Which samples a batch has, and leaving some of them out."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError, TaskError, read_json
from hftrain.data.datasets import has_length
from hftrain.data.mixing import MixtureSampler
from hftrain.data.samplers import pick, samplers_of
from hftrain.data.seeding import BatchWrapper, SeededBatches
from hftrain.data.sharding import DispatchLoader, RankLoader, rebuild_loader
from hftrain.extras.flight.identities import NamedBatch, NamingCollator

_KINDS: dict[type, str] = {int: "indices", tuple: "pairs of dataset and index", str: "hashes of their content"}


class RecordingBatches(BatchWrapper):
    """Another batch sampler, of which each batch is noted with its position in the pass, without excluded samples.

    The other samples stay in their batches. A batch with nothing left gets the next sample of the dataset that is not
    excluded, so that every process still has a batch.
    """

    passes_batches_on = True

    def __init__(self, batch_sampler: Any, *, dataset: Any, excluded: frozenset[Any] = frozenset()) -> None:
        super().__init__(batch_sampler)
        self.recorded: deque[tuple[int, list[Any]]] | None = None
        self._dataset, self._excluded = dataset, excluded

    def __iter__(self) -> Iterator[list[Any]]:
        return self._pass_on(self.batch_sampler, 0)

    def begin(self, start: int) -> Iterator[list[Any]] | None:
        """Iterate from a position; None if the batches before it must be drawn too."""
        batches = pick(self.batch_sampler, (start, None))
        return None if batches is None else self._pass_on(batches, start)

    def _pass_on(self, batches: Iterable[list[Any]], start: int) -> Iterator[list[Any]]:
        """Drop excluded samples, and note each batch with its position: loaders read ahead of the training."""
        if self.recorded is not None:
            self.recorded.clear()
        for position, batch in enumerate(batches, start):
            remaining = [sample for sample in batch if sample not in self._excluded] if self._excluded else batch
            if not remaining:
                remaining = [self._next_after(batch[0])]
            if self.recorded is not None:
                self.recorded.append((position, list(remaining)))
            yield remaining

    def _next_after(self, index: Any) -> Any:
        *sets, position = index if isinstance(index, tuple) else (index,)  # of a Mixture: the next one of the same set
        num = self._dataset.lengths[sets[0]] if sets else len(self._dataset)
        for step in range(1, num) if isinstance(position, Integral) else ():
            following = (int(position) + step) % num
            candidate = (*sets, following) if sets else following
            if candidate not in self._excluded:
                return candidate
        raise TaskError(
            "A batch has nothing left.",
            f"All its samples are in exclude_samples, and so is what comes after {index}, or that is not known.",
            "Use larger batches, or leave the samples out of the datasets themselves.",
        )


def with_known_samples(loader: Any, *, excluded: frozenset[Any] = frozenset()) -> Any:
    """Return a loader whose samples are known, and some of them left out; None if it is not one of hftrain's.

    Samples of map-style data are known by what their sampler draws, an index or the pair of a Mixture; those of streams
    and of data that the main process reads for all by `hash_of`.
    """
    kind: Any = type(loader)
    if kind is DispatchLoader:
        return loader.with_loader(_with_naming_collator(loader.loader, excluded))
    if kind not in (RankLoader, DataLoader):
        return None
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return _with_naming_collator(loader, excluded)
    batch_sampler: Any = loader.batch_sampler
    options: dict[str, Any] = {"dataset": loader.dataset, "excluded": excluded}
    if isinstance(batch_sampler, SeededBatches):
        recorder, batch_sampler = RecordingBatches(batch_sampler.batch_sampler, **options), copy.copy(batch_sampler)
        batch_sampler.batch_sampler = recorder
    else:
        batch_sampler = RecordingBatches(batch_sampler, **options)
    return rebuild_loader(loader, kind=kind, order=batch_sampler)


def _with_naming_collator(loader: Any, excluded: frozenset[Any]) -> Any:
    collator = NamingCollator(loader.collate_fn, is_whole=loader.batch_size is None, excluded=excluded)
    return rebuild_loader(loader, kind=type(loader), collate_fn=collator)


def with_recorded_samples(loader: Any) -> Any:
    """Return a loader whose samples are noted, or itself if they are not known."""
    changed = loader if find_recording_batches(loader) or find_naming_collator(loader) else with_known_samples(loader)
    if (naming := find_naming_collator(changed)) is not None:
        naming.is_naming = True
    return loader if changed is None else changed


def find_naming_collator(loader: Any) -> NamingCollator | None:
    """Return the collator of a loader that notes its samples, None if it has none."""
    collator = getattr(loader, "collate_fn", None)  # of the inner loader of one that dispatches
    return collator if isinstance(collator, NamingCollator) else None


def find_recording_batches(loader: Any) -> RecordingBatches | None:
    """Return the outermost `RecordingBatches` of a loader, None if it has none."""
    return next((part for part in samplers_of(loader) if isinstance(part, RecordingBatches)), None)


class RecordingFeed:
    """A feed that knows the samples of the batches that it has given.

    Attributes:
        epoch: The number of the pass.
    """

    def __init__(self, feed: Any) -> None:
        self.feed = feed
        self.epoch = 0
        self._pending_samples: deque[list[Any] | None] = deque()

    def __getattr__(self, name: str) -> Any:
        if name == "feed":
            raise AttributeError(name)
        return getattr(self.feed, name)

    def replace_dataset(self, hooks: Any, dataset: Any) -> RecordingFeed:
        """Read another dataset from now on."""
        self.feed = hooks.make_feed(dataset)
        return self

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """Return the pass's batches, see `Feed`."""
        recorder = find_recording_batches(self.feed.loader)
        if recorder is not None:
            recorder.recorded = deque()
        self._pending_samples.clear()
        self.epoch = epoch
        return self._record_samples(self.feed.open(epoch, skip=skip, offset=offset), recorder, skip)

    def _record_samples(self, batches: Iterator[Any], recorder: Any, first: int) -> Iterator[Any]:
        """Pair each batch with the samples that were noted for its position; some are skipped after a resume."""
        for position, batch in enumerate(batches, first):
            samples = None
            while recorder is not None and recorder.recorded and recorder.recorded[0][0] <= position:
                recorded_position, indices = recorder.recorded.popleft()
                samples = indices if recorded_position == position else None
            if isinstance(batch, NamedBatch):
                batch, samples = batch
            self._pending_samples.append(samples)
            yield batch

    def next_samples(self) -> list[Any] | None:
        """Return the samples of the batch that is trained on next."""
        return self._pending_samples.popleft() if self._pending_samples else None


class ExcludeSamples(TrainerCallback):
    """Leave samples of the training data out: ``Trainer(exclude_samples=[17, 42])``, or the path of a list in JSON.

    All other samples stay in their batches, in every pass, so a run resumed from before a sample's first use goes on
    as if the sample had never been there. Samples are named as in the flight log: by index, by the pair of a Mixture,
    or by the hash of what a stream yields.

    Raises:
        ConfigError: The list cannot be read or names no sample, the processes have different ones, or the data does
            not come from a loader of hftrain's.
        TaskError: A batch of a stream or Mixture has no other sample.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = _read_samples(samples)

    def wrap_stepper(self, stepper: Any, *, strategy: Any, **_: Any) -> Any:
        """Compare the lists of all processes."""
        lists = strategy.gather_object(sorted(map(repr, self.samples)))
        if any(samples != lists[0] for samples in lists):
            raise ConfigError(
                "Cannot leave samples out.",
                f"The processes have different lists, of {', '.join(str(len(samples)) for samples in lists)} samples.",
                "Pass the same exclude_samples in every process.",
            )
        return stepper

    def wrap_loader(self, loader: Any) -> Any:
        """Return the loader without the samples."""
        loader_without = with_known_samples(loader, excluded=self.samples)
        if loader_without is None:
            raise ConfigError(
                f"Cannot use exclude_samples with a {type(loader).__name__}.",
                "Samples are known in the loaders of hftrain and in those of torch that it takes over.",
                "Return such a loader, or leave the samples out of the data itself.",
            )
        is_paired = any(isinstance(part, MixtureSampler) for part in samplers_of(loader_without))
        kind = str if find_naming_collator(loader_without) else tuple if is_paired else int
        if wrong := [sample for sample in self.samples if type(sample) is not kind]:
            raise ConfigError(
                f"Cannot leave out sample {wrong[0]!r}.",
                f"This data names its samples by {_KINDS[kind]}, as in the flight log.",
                "Pass the list that hftrain blame writes for a run with this data.",
            )
        if kind is int and has_length(loader.dataset):
            num = len(loader.dataset)
            if unknown := sorted(sample for sample in self.samples if not 0 <= sample < num):
                problem = f"Cannot leave out sample {unknown[0]}."
                raise ConfigError(problem, f"The dataset has {num} samples.", "Correct exclude_samples.")
            if len(self.samples) >= num:
                raise ConfigError("Cannot leave out all samples.", "Nothing would be trained on.", "Shorten the list.")
        return loader_without


def _read_samples(samples: Any) -> frozenset[Any]:
    if isinstance(samples, (str, Path)):
        problem = f"Cannot read exclude_samples={str(samples)!r}."
        samples = read_json(samples, problem, "Pass a JSON file with a list of samples.")
    is_list = isinstance(samples, (list, tuple, set, frozenset, range))
    samples_list = [tuple(sample) if isinstance(sample, list) else sample for sample in samples] if is_list else []
    if not is_list or not all(type(sample) in _KINDS for sample in samples_list):
        raise ConfigError(
            f"Cannot use exclude_samples={samples!r:.100}.",
            "It is not a list of whole numbers, pairs or hashes.",
            "Pass the samples as in the flight log.",
        )
    return frozenset(samples_list)
