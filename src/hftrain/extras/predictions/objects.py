"""Objects among predictions: text, numbers and arrays in lists and mappings, sent between processes as JSON.

Unpickling can run arbitrary code, so only plain data is allowed, with one process as with several.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from hftrain.core.errors import TaskError
from hftrain.core.tree import as_array

_PLAIN = (type(None), bool, int, float, str)


class Objects(list[Any]):
    """Objects of one batch, one entry per sample."""


def to_plain(value: Any) -> Any:
    """Return nested plain data with its tensors as NumPy arrays; synchronises.

    Raises:
        TaskError: A value is not plain data; the error names its type.
    """
    if isinstance(value, torch.Tensor):
        return as_array(value)
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, _PLAIN) or (isinstance(value, numpy.ndarray) and not value.dtype.hasobject):
        return value
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(to_plain(entry) for entry in value)
    if isinstance(value, list):
        return [to_plain(entry) for entry in value]
    raise TaskError(
        "Objects among predictions were to be kept (eval_use_gather_object=True).",
        f"They hold a {type(value).__name__}, which cannot travel between processes as plain data.",
        "Return text, numbers, None, arrays or tensors, in lists, tuples and mappings.",
    )


def encode(value: Any) -> Any:
    """Return plain data from `to_plain` as JSON data, from which `decode` restores it with all types."""
    if isinstance(value, numpy.ndarray):
        data = base64.b64encode(value.tobytes()).decode("ascii")
        return {"array": data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"items": [[encode(key), encode(entry)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encode(entry) for entry in value]}
    return value


def decode(data: Any) -> Any:
    """Return the value that `encode` converted."""
    if not isinstance(data, dict):
        return data
    if "array" in data:
        # A copy, because an array over bytes is read-only.
        array = numpy.frombuffer(base64.b64decode(data["array"]), numpy.dtype(data["dtype"]))
        return array.reshape(data["shape"]).copy()
    if "items" in data:
        return {decode(key): decode(entry) for key, entry in data["items"]}
    ((kind, entries),) = data.items()
    return {"tuple": tuple, "list": list, "Objects": Objects}[kind](map(decode, entries))
