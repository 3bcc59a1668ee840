"""Locate an error in the user's dataset or collator: the sample, the batch and the worker."""

from __future__ import annotations

import re
import traceback
from types import FrameType, TracebackType
from typing import Any

from hftrain.core.errors import listed
from hftrain.core.notes import describe, facts_of
from hftrain.data.workers import open_samples

_FETCH = "torch.utils.data._utils.fetch"
_MAX_SAMPLES = 8


def locate_in_data(error: BaseException) -> str | None:
    """Describe the sample or batch at which reading the data failed; None if the error was raised elsewhere."""
    steps = list(traceback.walk_tb(error.__traceback__))
    place = next((index for index, (frame, _) in enumerate(steps) if frame.f_globals.get("__name__") == _FETCH), None)
    if place is None:
        return _in_worker(steps[-1][0] if steps else None, error.__traceback__)
    frame = steps[place][0]
    reader = frame.f_locals.get("self")
    indices = frame.f_locals.get("possibly_batched_index")
    samples = frame.f_locals.get("data")
    if samples is not None:
        is_known = isinstance(indices, list) and any(index is not None for index in indices)
        which = f"samples {listed(indices, most=_MAX_SAMPLES)}" if is_known else "a batch"  # type: ignore[arg-type]
        shown = f" The first: {describe(samples[0])}." if isinstance(samples, (list, tuple)) and samples else ""
        odd = facts_of(error).get("place")
        if odd is not None and is_known:
            which, shown = f"sample {indices[odd]}", f" It is {describe(samples[odd])}."  # type: ignore[index]
        return f"Raised in the data_collator {_name(getattr(reader, 'collate_fn', None))}, for {which}.{shown}"
    found = next((known for inner, _ in steps[place:] if (known := _sample(inner)) is not None), None)
    dataset = getattr(reader, "dataset", None)
    if found is None:
        return f"Raised while reading {type(dataset).__name__}."
    index, owner = found
    count = ""
    if isinstance(error, IndexError) and hasattr(owner, "__len__"):
        count = f", whose __len__ is {len(owner)}"
    return f"Raised in sample {index} of {type(owner).__name__}{count}."


def _sample(frame: FrameType) -> tuple[Any, Any] | None:
    """Return the index and the dataset of a frame that is a user's `__getitem__`."""
    code = frame.f_code
    if (
        code.co_name != "__getitem__"
        or code.co_argcount < 2
        or frame.f_globals.get("__name__", "").startswith("hftrain.")
    ):
        return None
    owner, index = (frame.f_locals.get(name) for name in code.co_varnames[:2])
    return index, owner


def _in_worker(frame: FrameType | None, trace: TracebackType | None) -> str | None:
    wrapped = None if frame is None or frame.f_code.co_name != "reraise" else frame.f_locals.get("self")
    worker = re.search(r"DataLoader worker process (\d+)", getattr(wrapped, "where", ""))
    if worker is None:
        return None
    samples, dataset, collator = open_samples(trace)
    asked = f"Raised in loader worker {worker[1]}, "
    if "return self.collate_fn(" in getattr(wrapped, "exc_msg", ""):
        asked += f"in the data_collator {_name(collator)}, for"
    else:
        asked += f"while reading {type(dataset).__name__}, in one of"
    which = f" the samples {listed(samples, most=_MAX_SAMPLES)}." if samples else " a batch."
    return f"{asked}{which} Set dataloader_num_workers=0 to debug it in this process."


def _name(collator: Any) -> str:
    # Skip our wrapper, which removes columns before it calls the user's collator.
    while type(collator).__module__.startswith("hftrain.") and hasattr(collator, "collator"):
        collator = collator.collator
    return getattr(collator, "__name__", type(collator).__name__)
