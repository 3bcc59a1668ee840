"""Loader workers: what can be sent to them, and a warning if each of them reads the whole stream."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from pickle import dumps
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.data.datasets import whole_dataset


def noticing_copies(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the same batches; warn if each worker of a stream's loader reads the whole stream.

    Workers take turns. If all of them give the same batch, and in the next round the same other batch, each of them
    reads the same data. Batches are compared until two differ.
    """
    num_workers, dataset = getattr(loader, "num_workers", 0), getattr(loader, "dataset", None)
    if num_workers < 2 or not isinstance(dataset, IterableDataset):
        return batches
    return chain(_compared(batches, num_workers, dataset), batches)


def _compared(batches: Iterator[Any], num_workers: int, dataset: Any) -> Iterator[Any]:
    rounds: list[bytes] = []
    for number, batch in enumerate(islice(batches, 2 * num_workers)):
        try:
            content = dumps(map_tensors(batch, _content))
        except Exception:  # a batch whose content cannot be compared
            content = b""
        yield batch
        is_new = number % num_workers == 0
        if not content or (content in rounds if is_new else content != rounds[-1]):
            return
        rounds += [content] if is_new else []
    if number == 2 * num_workers - 1:
        warn_once(
            f"Each of the {num_workers} loader workers reads the whole {type(whole_dataset(dataset)).__name__}, so "
            f"each sample is trained on {num_workers} times per epoch. Let its __iter__ return the share that "
            "torch.utils.data.get_worker_info() asks for, or set dataloader_num_workers=1."
        )


def _content(tensor: torch.Tensor) -> bytes:
    # Not pickled: that would include the place in memory.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


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
