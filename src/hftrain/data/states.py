"""Positions in data: states that are saved and restored, also in workers, and loaders that begin within an epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.distributed import DistributedSampler

from hftrain.core.errors import CheckpointError
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.data.columns import CollatorWrapper
from hftrain.data.datasets import StreamWrapper, epoch_stream, has_length, has_state
from hftrain.data.samplers import EvenedSampler, Later, RankBatches, is_cut, is_rank_aware, own_order, samplers_of
from hftrain.data.seeding import SeededBatches
from hftrain.data.sharding import DispatchLoader, RankLoader, batches_of, is_plain_loader, on_reader, rebuild_loader


def resumable_loader(loader: Any, *, seed: int, rank: int) -> Any:
    """Make a rank's loader exactly resumable: seeds for its workers, states of its dataset, an order of its own.

    A loader with its own iteration, or that needs none of these, is returned unchanged.
    """
    return on_reader(loader, partial(_resumable, seed=seed, rank=rank))


def _resumable(loader: Any, *, seed: int, rank: int) -> Any:
    if not is_plain_loader(loader):
        return loader
    dataset, has_own_state = loader.dataset, has_state(loader.dataset)
    if isinstance(dataset, IterableDataset):
        if not has_own_state:
            return loader
        if epoch_stream(dataset) is None:
            dataset = extra("streams").EpochStream(dataset, seed=seed, rank=rank)
        loader_class = StatefulLoader if loader.num_workers else RankLoader
        return rebuild_loader(loader, kind=loader_class, dataset=dataset)
    loader = _with_own_order(with_seeds(loader, seed=seed, rank=rank))
    if not (has_own_state and loader.num_workers):
        return loader
    if loader.persistent_workers:
        warn_once(f"{type(dataset).__name__} has a state, so each epoch starts new workers: they do not persist.")
    return rebuild_loader(loader, kind=StatefulLoader, persistent_workers=False)


def _with_own_order(loader: Any) -> Any:
    batches = batches_of(loader)
    order = own_order(batches) if type(loader) in (DataLoader, RankLoader) else batches
    return loader if order is batches else rebuild_loader(loader, kind=type(loader), order=order)


def with_seeds(loader: Any, *, seed: int, rank: int) -> Any:
    """Make a map-style loader send its workers a seed with each batch; see `SeededBatches`."""
    batches = loader.batch_sampler
    if not loader.num_workers or batches is None:
        return loader
    if any(isinstance(part, SeededBatches) for part in (batches, *samplers_of(batches))):
        return loader
    return rebuild_loader(loader, order=SeededBatches(batches, seed=seed, rank=rank))


class StatefulLoader(RankLoader):
    """Read a dataset with a state in workers, and track the state of each worker's copy at every batch.

    Workers read ahead, so each batch carries the state of its worker's copy right after it. A map-style
    dataset resumes with the next batch. Each worker reads its own part of a stream and resumes at the start
    of the current round (one batch from each worker): fewer batches than there are workers are read again.

    A stream must have an `EpochStream` inside, and there must be workers.
    """

    def __init__(self, dataset: Any, *, collate_fn: Any, worker_init_fn: Any, **options: Any) -> None:
        self._later: Later | None = None
        if not isinstance(dataset, IterableDataset):
            name = "batch_sampler" if options.get("batch_sampler") is not None else "sampler"
            self._later = options[name] = Later(options[name], 0)
        self._worker_start = _WorkerStart(worker_init_fn)
        super().__init__(dataset, collate_fn=_Stamp(collate_fn), worker_init_fn=self._worker_start, **options)
        # Batches before the latest iteration, and up to now.
        self._num_before = self._num_batches = 0
        self._is_loaded = False
        # By worker: its last two states, each with the number of batches before it.
        self._states: list[list[tuple[int, Any]]] = [[] for _ in range(self.num_workers)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration, as of the batches that it has yielded."""
        if self._later is not None:
            # The next batch comes from the first of the new workers. One without a state was never used: it starts
            # from a seed that depends on its number, so the few batches of the others are read again.
            latest = [states[-1:] for states in self._states]
            is_first = self._num_batches < self.num_workers
            next_worker = (self._num_batches - self._num_before) % self.num_workers
            num_to_drop = self._num_batches if is_first else 0
            workers = [[]] * self.num_workers if is_first else latest[next_worker:] + latest[:next_worker]
            return {"num_batches": self._num_batches, "num_to_drop": num_to_drop, "workers": workers}
        counts = [states[-1][0] if states else 0 for states in self._states]
        num_rounds = max(counts) - (min(counts) != max(counts))
        workers = [[entry for entry in states if entry[0] <= num_rounds][-1:] for states in self._states]
        num_to_drop = sum(count > num_rounds for count in counts)
        return {"num_batches": self._num_batches, "num_to_drop": num_to_drop, "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at the position of another loader with as many workers."""
        self._states = [[(int(count), worker_state) for count, worker_state in entries] for entries in state["workers"]]
        self._worker_start.entries = [entries[-1] if entries else None for entries in self._states]
        self._num_batches, self._is_loaded = int(state["num_batches"]), True
        self._num_before = self._num_batches - int(state["num_to_drop"])

    def __len__(self) -> int:
        return super().__len__() + (0 if self._later is None else self._later.skip)

    def skip(self, num_batches: int) -> bool:
        """Begin the next iteration later, with the dataset unchanged; False for a stream, which cannot skip."""
        if self._later is not None:
            self.load_state_dict({"num_batches": num_batches, "num_to_drop": 0, "workers": [[]] * self.num_workers})
        return self._later is not None

    def __iter__(self) -> Any:
        if not self._is_loaded:
            self._states = [[] for _ in range(self.num_workers)]
            self._num_before = self._num_batches = 0
        num_to_drop, self._num_batches = self._num_batches - self._num_before, self._num_before
        if self._later is not None:
            self._later.skip = self._num_before
        batches = self._track_states(super().__iter__())
        # The workers have their copies by now; those of the next epoch begin with the unchanged dataset.
        self._worker_start.entries, self._is_loaded = [], False
        for _ in range(num_to_drop):
            next(batches, None)
        return batches

    def _track_states(self, iterator: Iterator[Stamped]) -> Iterator[Any]:
        for stamped in iterator:
            states = self._states[stamped.worker]
            states.append((states[-1][0] + 1 if states else 1, stamped.state))
            del states[:-2]
            self._num_batches += 1
            yield stamped.batch


class Stamped:
    """A batch in transit from a worker, with the state of the worker's dataset."""

    def __init__(self, batch: Any, worker: int, state: Any) -> None:
        self.batch = batch
        self.worker = worker
        self.state = state

    def pin_memory(self, *args: Any) -> Stamped:
        """Pin the batch, not the state; called by torch's loader."""
        self.batch = pin_memory(self.batch, *args)  # type: ignore[no-untyped-call]
        return self


class _Stamp(CollatorWrapper):
    """Collate, and add the state of the worker's dataset; runs in the worker, after each batch."""

    def __call__(self, samples: Any) -> Stamped:
        batch = self.data_collator(samples)
        worker: Any = get_worker_info()
        # A copy, because it is sent while the dataset is read further.
        state = copy.deepcopy(worker.dataset.state_dict())
        stream = epoch_stream(worker.dataset)
        if stream is not None:
            stream.end_batch()
        return Stamped(batch, worker.id, state)


class _WorkerStart:
    """Initialise a worker and restore the state of its dataset; runs in the worker before it reads."""

    def __init__(self, worker_init: Callable[[int], Any] | None) -> None:
        self.inner = worker_init
        self.entries: list[tuple[int, Any] | None] = []

    def __call__(self, worker_id: int) -> None:
        if self.inner is not None:
            self.inner(worker_id)
        entry = self.entries[worker_id] if self.entries else None
        if entry is not None:
            dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
            dataset.load_state_dict(entry[1])
            stream = epoch_stream(dataset)
            if stream is not None:
                stream.num_batches = entry[0]


class OffsetStream(StreamWrapper):
    """Read and drop the first samples of a stream."""

    def __init__(self, dataset: Any, *, offset: int) -> None:
        super().__init__(dataset)
        self._offset = offset

    @property
    def generator(self) -> Any:
        """The stream's own generator, which is seeded for each epoch."""
        return getattr(self.dataset, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataset, self._offset, None)

    def __len__(self) -> int:
        return max(0, len(self.dataset) - self._offset)


def samples_per_round(loader: Any, *, world_size: int) -> int | None:
    """Return how many samples all ranks read together for one micro-step.

    None if batches may differ in size, or come from several workers that each read a part of a stream, so that
    the order of the samples depends on the batch size.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> samples_per_round(DataLoader(range(10), batch_size=4), world_size=2)
        8
    """
    if isinstance(loader, DispatchLoader):
        loader = loader.loader
    if not is_plain_loader(loader):
        return None
    if isinstance(loader.dataset, IterableDataset):
        is_countable = loader.batch_size is not None and loader.num_workers <= 1
        return loader.batch_size * world_size if is_countable else None
    part, num_sharing = batches_of(loader), 1
    while _is_wrapper(part):
        num_sharing *= part.num_processes if getattr(part, "split_batches", False) else 1
        part = _inside(part)
    return part.batch_size * world_size // num_sharing if type(part) is BatchSampler else None


def has_own_shares(loader: Any, *, world_size: int) -> bool:
    """Return whether the data shards itself over ranks, so that the shares for other numbers of ranks are unknown.

    The shares of hftrain, accelerate and torch's `DistributedSampler` are known: each round takes the next samples of
    one order.
    """
    if world_size == 1 or isinstance(loader, DispatchLoader) or not is_plain_loader(loader):
        return False
    part = loader.dataset if isinstance(loader.dataset, IterableDataset) else batches_of(loader)
    while _is_wrapper(part) or type(part) is BatchSampler:
        if is_cut(part):
            return False
        part = _inside(part)
    return not isinstance(part, DistributedSampler)


def begin_at(loader: Any, *, offset: int = 0, skip: int = 0) -> tuple[Any, int]:
    """Make a loader begin within an epoch, by drawing only indices if possible.

    Args:
        offset: Samples of all ranks together before the first batch.
        skip: Batches of this rank to skip after them.

    Returns:
        The loader, and how many of its batches must be read and dropped first.

    Raises:
        CheckpointError: There is an offset, and the order in which all ranks read is unknown.
    """
    if not (offset or skip):
        return loader, 0
    if isinstance(loader, DispatchLoader):
        reader, num_to_drop = begin_at(loader.loader, offset=offset, skip=skip * loader.world_size)
        return on_reader(loader, lambda _: reader), num_to_drop // loader.world_size
    if isinstance(loader, StatefulLoader) and not offset and loader.skip(skip):
        return loader, 0
    if offset and not is_plain_loader(loader):
        raise _cannot_begin(f"a {type(loader).__name__}, which iterates in its own way", offset)
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if not offset and (is_stream or not is_plain_loader(loader)):
        return loader, skip
    # This loader's workers must end with the epoch; the original loader's workers wait for the next one.
    changes: dict[str, Any] = {"persistent_workers": False}
    if is_stream:
        return rebuild_loader(loader, dataset=_shifted(loader.dataset, offset), **changes), skip
    order = _shifted(batches_of(loader), offset) if offset else batches_of(loader)
    return rebuild_loader(loader, order=Later(order, skip) if skip else order, **changes), 0


def num_batches_from(loader: Any, offset: int) -> int | None:
    """Return the number of batches of an epoch after `offset` samples of all ranks; None if unknown."""
    later = begin_at(loader, offset=offset)[0]
    return len(later) if has_length(later) else None


def _shifted(part: Any, offset: int) -> Any:
    """Copy a chain of samplers or streams with the offset inserted below the batching and sharding."""
    if _is_wrapper(part) or type(part) is BatchSampler:
        changed = copy.copy(part)
        setattr(changed, _name_inside(part), _shifted(_inside(part), offset))
        return changed
    if is_rank_aware(part) or isinstance(part, BatchSampler):
        raise _cannot_begin(f"a {type(part).__name__}, which batches or shards the data itself", offset)
    return OffsetStream(part, offset=offset) if isinstance(part, IterableDataset) else Later(part, offset)


def _is_wrapper(part: Any) -> bool:
    """Recognise hftrain's own wrappers of batches or streams, and accelerate's by name, to import nothing."""
    wrapper_classes = (RankBatches, SeededBatches, Later, EvenedSampler)
    if getattr(part, "passes_batches_on", False):
        return True
    return isinstance(part, wrapper_classes) or type(part).__name__ in ("BatchSamplerShard", "IterableDatasetShard")


def _name_inside(part: Any) -> str:
    return next(name for name in ("batch_sampler", "sampler", "dataset") if hasattr(part, name))


def _inside(part: Any) -> Any:
    return getattr(part, _name_inside(part))


def _cannot_begin(source: str, offset: int) -> CheckpointError:
    return CheckpointError(
        "A run was resumed with another batch size or number of processes.",
        f"It stands {offset} samples into a batch of the new size, and its data comes from {source}.",
        "Resume with the batch size and number of processes of the checkpoint, or from an epoch's end.",
    )
