"""Wrappers of streams, and whether the dataset inside them has a state."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from hftrain.core.optional import installed_versions


class StreamWrapper(IterableDataset[Any]):
    """A stream that wraps another one and shares its epoch and state."""

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


def has_state(data: Any) -> bool:
    """Return whether a dataset (without its wrappers) or a loader can resume exactly from its state.

    A `datasets.IterableDataset` that shuffles cannot: its state does not include its buffer. Nor can one
    from a generator function, which is run again up to its position and may draw random numbers, nor any before
    datasets 5.0, whose state can be ahead of the samples that were read (seen up to 4.8). Those are read again from
    the epoch's start, like streams without a state.

    Example:
        >>> import torch
        >>> has_state([1, 2]), has_state(torch.nn.Identity())
        (False, True)
    """
    while isinstance(data, StreamWrapper):
        data = data.dataset
    if hasattr(data, "base_dataloader"):  # an accelerate loader has the methods even if the inner loader lacks them
        return has_state(data.base_dataloader)
    if not (callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))):
        return False
    source = getattr(data, "_ex_iterable", None)
    return source is None or not (_is_before_datasets_5() or _has_more_than_its_state(source))


def _is_before_datasets_5() -> bool:
    return int(installed_versions("datasets").get("datasets", "5").partition(".")[0]) < 5


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
