"""The documented functions on nested tensors and arrays, for code that gathers predictions itself.

The loops use `hftrain.core.tree` and `hftrain.loops.gather`, which copy less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from hftrain.core.errors import TaskError
from hftrain.core.tree import as_array, detach, map_tensors

_ROWS = (torch.Tensor, numpy.ndarray)


def nested_concat(tensors: Any, new_tensors: Any, padding_index: int = -100) -> Any:
    """Concatenate two nested structures along the first dimension; pad the second dimension if it differs.

    Args:
        tensors: Tensors or arrays, or lists, tuples and mappings of them.
        new_tensors: The same structure.
        padding_index: The padding value of shorter rows.

    Raises:
        TaskError: The structures differ or contain other types.

    Source: the documented `nested_concat`.

    Example:
        >>> nested_concat(torch.ones(1, 2), torch.zeros(1, 3)).tolist()
        [[1.0, 1.0, -100.0], [0.0, 0.0, 0.0]]
    """
    if any(isinstance(tensors, kind) and isinstance(new_tensors, kind) for kind in _ROWS):
        return _joined(tensors, new_tensors, padding_index)
    if type(tensors) is type(new_tensors) and isinstance(tensors, (list, tuple)):
        return type(tensors)(nested_concat(a, b, padding_index) for a, b in zip(tensors, new_tensors, strict=True))
    if type(tensors) is type(new_tensors) and isinstance(tensors, Mapping):
        return _like(tensors, {k: nested_concat(v, new_tensors[k], padding_index) for k, v in tensors.items()})
    raise TaskError(
        f"Cannot join a {type(tensors).__name__} with a {type(new_tensors).__name__}:",
        "only tensors, arrays, and lists, tuples and mappings of them can be joined, each with its own kind.",
        "Give two structures of the same form.",
    )


def nested_numpify(tensors: Any) -> Any:
    """Return nested tensors as NumPy arrays; bfloat16 becomes float32. Source: the documented `nested_numpify`."""
    return map_tensors(tensors, as_array)


def nested_detach(tensors: Any) -> Any:
    """Detach nested tensors. Source: the documented `nested_detach`."""
    return detach(tensors)


def nested_truncate(tensors: Any, limit: int) -> Any:
    """Return the first rows of nested tensors or arrays. Source: the documented `nested_truncate`."""
    return _mapped(tensors, lambda leaf: leaf[:limit])


def find_batch_size(tensors: Any) -> int | None:
    """Return the length of the first tensor or array that has one, or None. Source: the documented `find_batch_size`.

    Example:
        >>> find_batch_size({"loss": torch.tensor(1.0), "logits": torch.zeros(4, 3)})
        4
    """
    if isinstance(tensors, _ROWS):
        return int(tensors.shape[0]) if tensors.ndim else None
    parts = tensors.values() if isinstance(tensors, Mapping) else tensors if isinstance(tensors, (list, tuple)) else ()
    return next((size for part in parts if (size := find_batch_size(part)) is not None), None)


def distributed_concat(tensor: Any, num_total_examples: int | None = None) -> Any:
    """Concatenate the rows of all processes, which must be equal in number. Collective.

    Args:
        tensor: A tensor, or a nested structure of them; 0-d ones become rows.
        num_total_examples: Truncate the result to this many rows.

    Source: the documented `distributed_concat`.
    """

    def gathered(leaf: torch.Tensor) -> torch.Tensor:
        rows = torch.atleast_1d(leaf).contiguous()  # type: ignore[no-untyped-call]
        parts = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, rows)
        return torch.cat(parts)[:num_total_examples]

    return _mapped(tensor, gathered)


def nested_gather(tensors: Any, parallel_mode: Any, name: str | None = None) -> Any:
    """Gather the rows of all processes; with one process, return the tensors unchanged. Collective.

    Source: the documented `nested_gather`.
    """
    if tensors is None or str(getattr(parallel_mode, "value", parallel_mode)) != "distributed":
        return tensors
    return distributed_concat(tensors)


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Context manager in which the first process of a node runs before the others. Collective.

    Args:
        local_rank: This process's rank on its node; -1 for a single process, which does not wait.

    Source: the documented `torch_distributed_zero_first`.
    """
    if local_rank not in (-1, 0):
        torch.distributed.barrier()
    yield
    if local_rank == 0:
        torch.distributed.barrier()


def denumpify_detensorize(metrics: Any) -> Any:
    """Convert the one-element tensors and NumPy numbers in metrics to plain numbers.

    Source: the documented `denumpify_detensorize`.
    """

    def plain(leaf: Any) -> Any:
        is_number = isinstance(leaf, numpy.generic) or (isinstance(leaf, torch.Tensor) and leaf.numel() == 1)
        return leaf.item() if is_number else leaf

    return _mapped(metrics, plain)


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, (list, tuple)):
        items = [_mapped(item, function) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        return _like(tree, {key: _mapped(value, function) for key, value in tree.items()})
    return function(tree)


def _like(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    return type(tree)(items)  # type: ignore[call-arg]


def _joined(first: Any, second: Any, padding: int) -> Any:
    is_tensor = isinstance(first, torch.Tensor)
    rows: list[Any] = [torch.atleast_1d(each) if is_tensor else numpy.atleast_1d(each) for each in (first, second)]  # type: ignore[no-untyped-call]
    if rows[0].ndim > 1 and rows[0].shape[1] != rows[1].shape[1]:
        width = max(each.shape[1] for each in rows)
        rows = [_widened(each, width, padding) for each in rows]
    return torch.cat(rows) if is_tensor else numpy.concatenate(rows)


def _widened(rows: Any, width: int, padding: int) -> Any:
    shape = (rows.shape[0], width, *rows.shape[2:])
    wide = (
        rows.new_full(shape, padding) if isinstance(rows, torch.Tensor) else numpy.full_like(rows, padding, shape=shape)
    )
    wide[:, : rows.shape[1]] = rows
    return wide
