"""Locate an error in the user's dataset or collator: the sample, the batch and the worker."""

from __future__ import annotations

import re
import traceback
from typing import Any

from hftrain.core.errors import listed
from hftrain.core.notes import describe, facts_of
from hftrain.data.datasets import has_length
from hftrain.data.workers import names_of_the_fetch, open_samples

# The lines in a traceback with which torch calls a dataset or a collator.
_CALLS = re.compile(r'_utils.fetch\.py", line \d+, in \S+\n\s+(.*)')
_MAX_SAMPLES = 8


def locate_in_data(error: BaseException) -> str | None:
    """Describe the sample or batch at which reading the data failed; None if the error was raised elsewhere."""
    worker = re.search(r"in DataLoader worker process (\d+)", str(error))
    calls = _CALLS.findall(str(error) if worker else "".join(traceback.format_tb(error.__traceback__)))
    if not calls:
        return None
    known = names_of_the_fetch(error.__traceback__)
    indices, reader = known.get("possibly_batched_index"), known.get("self")
    dataset: Any = getattr(reader, "dataset", None)
    collator: Any = getattr(reader, "collate_fn", None)
    where, end = "Raised", ""
    if worker:
        indices, dataset, collator = open_samples(error.__traceback__)
        where = f"Raised in loader worker {worker[1]}"
        end = " Set dataloader_num_workers=0 to debug it in this process."
    is_listed = isinstance(indices, (list, tuple)) and any(index is not None for index in indices)
    which = f"samples {listed(indices, most=_MAX_SAMPLES)}" if is_listed else ""  # type: ignore[arg-type]
    if "collate_fn(" in calls[-1]:
        samples, odd = known.get("data"), facts_of(error).get("place")
        if odd is not None and which and samples:
            which, end = f"sample {indices[odd]}", f" It is {describe(samples[odd])}."  # type: ignore[index]
        elif isinstance(samples, (list, tuple)) and samples:
            end = f" The first: {describe(samples[0])}."
        return f"{where} in the data_collator {_name(collator)}, for {which or 'a batch'}.{end}"
    which = f"sample {known['idx']} of " if "idx" in known else f"one of {which} of " if which else ""
    if isinstance(error, IndexError) and has_length(dataset) and not worker:
        end = f" Its __len__ is {len(dataset)}."
    return f"{where} while reading {which}{type(dataset).__name__}.{end}"


def _name(collator: Any) -> str:
    # Skip our wrapper, which removes columns before it calls the user's collator.
    while type(collator).__module__.startswith("hftrain.") and hasattr(collator, "data_collator"):
        collator = collator.data_collator
    return getattr(collator, "__name__", type(collator).__name__)
