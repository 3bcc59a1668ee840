"""Whether the parts of a loader can be pickled for worker processes that are not forked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import torch

from hftrain.core.errors import ConfigError


def check_sendable(parts: Mapping[str, Any], *, num_workers: int, method: str | None = None) -> None:
    """Raise if a part cannot be sent to worker processes; the keys name the parts in the error.

    The contents of tensors are not read.
    """
    method = method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if num_workers == 0 or method == "fork":
        return
    for name, part in parts.items():
        try:
            _DryPickler(_Nowhere()).dump(part)
        except Exception as error:
            raise ConfigError(
                f"Cannot use dataloader_num_workers={num_workers} when processes are started by {method!r}.",
                f"{name} ({type(part).__name__}) cannot be sent to a worker: {error}.",
                "Define its functions and classes at the top level of a module, open files in the worker, at the "
                "first sample, or set dataloader_num_workers=0.",
            ) from error


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _DryPickler(ForkingPickler):
    """Pickle an object without its tensors, which are large and can always be sent."""

    def reducer_override(self, obj: Any) -> Any:
        is_array = isinstance(obj, numpy.ndarray) and obj.dtype != object
        return (int, ()) if is_array or isinstance(obj, (torch.Tensor, torch.UntypedStorage)) else NotImplemented
