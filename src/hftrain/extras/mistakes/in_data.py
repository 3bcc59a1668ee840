"""Locate an error in the user's dataset or collator: the sample, the batch or the worker."""

from __future__ import annotations

import re
from traceback import format_tb, walk_tb
from types import TracebackType
from typing import Any

from hftrain.core.errors import listed
from hftrain.core.notes import describe, facts_of
from hftrain.data.datasets import has_length

# The lines in a traceback with which torch calls a dataset or a collator.
_CALLS = re.compile(r'_utils.fetch\.py", line \d+, in \S+\n\s+(.*)')
_IN_A_WORKER = re.compile(r"in DataLoader worker process (\d+)")
_FETCHERS = ("torch.utils.data._utils.fetch", "torch.utils.data.dataset")
_MAX_SAMPLES = 8


def locate_in_data(error: BaseException) -> str | None:
    """Describe the sample or batch at which reading the data failed; None if the error was raised elsewhere."""
    if worker := _IN_A_WORKER.search(str(error)):
        calls = _CALLS.findall(str(error))
        part = "the data_collator" if calls and "collate_fn(" in calls[-1] else "the dataset"
        more = "Set dataloader_num_workers=0 to debug it in this process, where the sample is named."
        return f"Raised in loader worker {worker[1]} in {part}. {more}"
    calls = _CALLS.findall("".join(format_tb(error.__traceback__)))
    if not calls:
        return None
    known = _names_of_the_fetch(error.__traceback__)
    indices, reader = known.get("possibly_batched_index"), known.get("self")
    dataset: Any = getattr(reader, "dataset", None)
    is_listed = isinstance(indices, (list, tuple)) and any(index is not None for index in indices)
    which = f"samples {listed(indices, most=_MAX_SAMPLES)}" if is_listed else ""  # type: ignore[arg-type]
    end = ""
    if "collate_fn(" in calls[-1]:
        samples, odd = known.get("data"), facts_of(error).get("place")
        if odd is not None and which and samples:
            which, end = f"sample {indices[odd]}", f" It is {describe(samples[odd])}."  # type: ignore[index]
        elif isinstance(samples, (list, tuple)) and samples:
            end = f" The first: {describe(samples[0])}."
        return (
            f"Raised in the data_collator {_name(getattr(reader, 'collate_fn', None))}, for {which or 'a batch'}.{end}"
        )
    which = f"sample {known['idx']} of " if "idx" in known else f"one of {which} of " if which else ""
    if isinstance(error, IndexError) and has_length(dataset):
        end = f" Its __len__ is {len(dataset)}."
    return f"Raised while reading {which}{type(dataset).__name__}.{end}"


def _names_of_the_fetch(trace: TracebackType | None) -> dict[str, Any]:
    """Return what torch's fetcher held when reading or collating failed: its own frames, none of the user's."""
    # The outermost ones, which belong to the loader's dataset, come last.
    frames = [frame for frame, _ in walk_tb(trace) if frame.f_globals.get("__name__") in _FETCHERS]
    return {name: value for frame in reversed(frames) for name, value in frame.f_locals.items()}


def _name(collator: Any) -> str:
    # Skip our wrapper, which removes columns before it calls the user's collator.
    while type(collator).__module__.startswith("hftrain.") and hasattr(collator, "data_collator"):
        collator = collator.data_collator
    return getattr(collator, "__name__", type(collator).__name__)
