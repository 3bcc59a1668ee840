"""Datasets and loaders: wrappers of streams, whether they have a state and a length, and several evaluation sets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.core.extras import installed_versions
from hftrain.core.preserve import preserved
from hftrain.core.state import TrainerState
from hftrain.core.tree import batch_size_of


class StreamWrapper(IterableDataset[Any]):
    """A stream that wraps another one and shares its epoch and state.

    Attributes:
        seeds_workers: Whether it seeds the workers that read it, in each epoch.
        is_cut: Whether ranks cut their shares from what it wraps, which must then be the same on all of them.
        passes_batches_on: Whether it only evens out or shares out what it wraps.
    """

    seeds_workers = is_cut = passes_batches_on = False

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to a stream that has `set_epoch`."""
        tell_epoch(self.dataset, epoch)

    def state_dict(self) -> Any:
        """Return the state of the stream."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of the stream for the next iteration."""
        self.dataset.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.dataset)


def tell_epoch(part: Any, epoch: int) -> None:
    """Call `set_epoch` on every object of the loading pipeline that has it."""
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


def set_dataset_epoch(dataset: Any, *, epoch: int, seed: int) -> None:
    """Set a dataset's epoch: reseed a stream's `generator`, call `set_epoch`, as documented; mutates the dataset."""
    generator = getattr(dataset, "generator", None)
    if isinstance(dataset, IterableDataset) and isinstance(generator, torch.Generator):
        generator.manual_seed(seed + epoch)
    tell_epoch(dataset, epoch)


def has_state(data: Any) -> bool:
    """Return whether a dataset (without its wrappers) or a loader can resume exactly from its state.

    A `datasets.IterableDataset` that shuffles cannot: its state does not include its buffer. Nor can one
    from a generator function, which is run again up to its position and may draw random numbers, nor any before
    datasets 5.0, whose state can be ahead of the samples that were read (seen up to 4.8). Those are read again from
    the epoch's start, like streams without a state.
    """
    while isinstance(data, StreamWrapper):
        data = data.dataset
    if hasattr(data, "base_dataloader"):  # an accelerate loader has the methods even if the inner loader lacks them
        return has_state(data.base_dataloader)
    if not (callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))):
        return False
    if needs_own_loader(data):
        return False
    source = getattr(data, "_ex_iterable", None)
    if source is None:
        return True
    version = installed_versions("datasets").get("datasets", "5")
    return int(version.partition(".")[0]) >= 5 and not _has_more_than_its_state(source)


@contextmanager
def preserved_data(*datasets: Any) -> Iterator[None]:
    """Leave the datasets that have a state where they were before the context, however much of them is read within."""
    stateful = [dataset for dataset in map(whole_dataset, datasets) if has_state(dataset)]
    states = [copy.deepcopy(dataset.state_dict()) for dataset in stateful]
    # The attributes last: a stream's own state may be out of date before it is iterated.
    with preserved(*stateful):
        try:
            yield
        finally:
            for dataset, state in zip(stateful, states, strict=True):
                dataset.load_state_dict(state)


def load_state(dataset: Any, state: Any) -> Callable[[], None]:
    """Load the state of a dataset; return a function that puts it back, with the attributes that this has set."""
    source, former_state = whole_dataset(dataset), copy.deepcopy(dataset.state_dict())
    before = dict(getattr(source, "__dict__", {}))
    dataset.load_state_dict(state)
    after = dict(getattr(source, "__dict__", {}))
    changed_names = [name for name in after if name not in before or before[name] is not after[name]]

    def put_back() -> None:
        dataset.load_state_dict(former_state)
        # A stream that starts over would begin at the state, which may be where an earlier run has left it.
        for name in changed_names:
            vars(source).pop(name, None)
        vars(source).update({name: before[name] for name in changed_names if name in before})

    return put_back


def needs_own_loader(dataset: Any) -> bool:
    """Return whether a stream's `state_dict` must be told what was read, as litdata's and mosaicml-streaming's."""
    method: Any = getattr(dataset, "state_dict", None)
    is_stream = isinstance(dataset, IterableDataset) and callable(method)
    return is_stream and any(p.default is p.empty for p in signature(method).parameters.values())


def _has_more_than_its_state(source: Any) -> bool:
    """Return whether a `datasets.IterableDataset` has a shuffle buffer or a generator function.

    Recognised by name, to import nothing.
    """
    if source is None:
        return False
    maker = type(getattr(getattr(source, "generate_examples_fn", None), "__self__", None))
    is_generated = maker.__module__ == "datasets.packaged_modules.generator.generator"
    sources = [getattr(source, "ex_iterable", None), *(getattr(source, "ex_iterables", None) or ())]
    is_shuffled = type(source).__name__ == "BufferShuffledExamplesIterable"
    return is_generated or is_shuffled or any(map(_has_more_than_its_state, sources))


def has_length(obj: Any) -> bool:
    """Return whether `len(obj)` works."""
    try:
        len(obj)
    except (TypeError, AttributeError, NotImplementedError):
        return False
    return True


def num_examples(loader: Any, *, batch_size: int = 1) -> int:
    """Count the samples of a loader, over all ranks if its dataset has a length; `TypeError` without any length.

    Without a dataset's length: the sizes of a list's batches, or batches times the loader's (or else the given) size.

    Source:
        The documented `Trainer.num_examples`.
    """
    dataset = whole_dataset(getattr(loader, "dataset", None))
    if has_length(dataset):
        return len(dataset)
    if isinstance(loader, Sequence):
        return sum(batch_size_of(batch) or batch_size for batch in loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    batch_length = getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None) or batch_size
    return len(loader) * int(batch_length)


def expected_samples(loader: Any) -> int | None:
    """Return the largest number of samples that this rank's loader can yield; None if unknown."""
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None or not has_length(loader):
        return None
    num_samples = len(loader) * int(batch_size)
    sampler: Any = getattr(loader, "sampler", None)
    return min(num_samples, len(sampler)) if has_length(sampler) else num_samples


def whole_dataset(dataset: Any) -> Any:
    """Return the dataset inside the wrappers that give each rank its share of a stream."""
    # The wrappers of accelerate and transformers are recognised by name, to import neither.
    while isinstance(dataset, StreamWrapper) or type(dataset).__name__ == "IterableDatasetShard":
        dataset = dataset.dataset
    return dataset


def splits_among_workers(dataset: Any) -> bool:
    """Recognise a `datasets.IterableDataset`, which distributes its shards to the workers."""
    return hasattr(dataset, "n_shards") and callable(getattr(dataset, "shard", None))


def epoch_stream(dataset: Any) -> Any:
    """Return the wrapper that seeds a stream's workers, at any depth of the wrappers; None if there is none."""
    while isinstance(dataset, StreamWrapper) and not dataset.seeds_workers:
        dataset = dataset.dataset
    return dataset if isinstance(dataset, StreamWrapper) else None


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One of several evaluation sets, as a value of the dict given as `eval_dataset`.

    During training, a set is evaluated at those evaluations of the run that its interval includes. Calling `evaluate()`
    directly evaluates every set, and so does `eval_on_start`.

    Args:
        dataset: The data.
        every: Optimizer steps (``eval_strategy="steps"``) or epochs (``"epoch"``) between its evaluations; None takes
            part in each. In steps, a multiple of `eval_steps`.
        metrics: ``f(EvalPrediction) -> dict`` in place of `compute_metrics`.

    Raises:
        ConfigError: `every` is not a positive whole number, or there is no dataset.

    Example:
        >>> EvalSet([1, 2], every=500).every
        500
    """

    dataset: Any
    every: int | None = None
    metrics: Callable[..., Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.dataset is None:
            raise ConfigError("Cannot make an EvalSet.", "It has no dataset.", "Pass the data as its first argument.")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError(
                "Cannot make an EvalSet with its own schedule.",
                "Steps or passes are counted in positive whole numbers.",
                "Give a multiple of eval_steps, or a number of passes.",
                every=self.every,
            )


def split_eval_sets(eval_dataset: Any) -> tuple[Any, dict[str, EvalSet]]:
    """Return the datasets without their `EvalSet` wrappers, and the wrappers by name."""
    if isinstance(eval_dataset, EvalSet):
        raise ConfigError(
            "Cannot use an EvalSet as eval_dataset.",
            "It has no name for its metrics.",
            "Pass a dict: eval_dataset={'name': EvalSet(...)}.",
        )
    if not isinstance(eval_dataset, Mapping):
        return eval_dataset, {}
    sets = {name: entry for name, entry in eval_dataset.items() if isinstance(entry, EvalSet)}
    if not sets:
        return eval_dataset, {}
    return {name: sets[name].dataset if name in sets else data for name, data in eval_dataset.items()}, sets


def is_due(entry: EvalSet | None, state: TrainerState, *, by_epoch: bool) -> bool:
    """Return whether a set takes part in the current evaluation of a run.

    Args:
        entry: None for a set without its own interval.
        by_epoch: Whether the interval counts epochs, else optimizer steps.
    """
    if entry is None or entry.every is None:
        return True
    if by_epoch:
        epoch = state.epoch or 0.0
        return abs(epoch - round(epoch)) < 1e-6 and round(epoch) % entry.every == 0
    return state.global_step % entry.every == 0
