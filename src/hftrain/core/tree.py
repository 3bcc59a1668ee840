"""Nested batches and outputs: tensors in tuples, lists and mappings.

These run for every batch. `dict` is tested before `Mapping`, whose instance check is a slow Python call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

# torch's nested structures: the names of pytrees that torch offers to others stand under a private one.
pytree = _pytree

# The names of a model's keys and values of earlier tokens: `cache` since transformers 5.24, the others before.
CACHES = ("cache", "past_key_values", "cache_params")


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of earlier tokens, an object that transformers' models return and take."""
    return hasattr(value, "get_seq_length")


def uncompiled(model: Any) -> Any:
    """Return the model inside torch.compile's wrapper, or the model itself; does not import the compiler."""
    return getattr(model, "_orig_mod", model)


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `function` to every tensor of a nested structure; keeps other leaves and the container types."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (int, float, str)):  # the state of a random number generator has thousands
        return tree
    if isinstance(tree, (dict, Mapping)):
        items = {
            key: function(value) if isinstance(value, torch.Tensor) else map_tensors(value, function)
            for key, value in tree.items()
        }
        if type(tree) is dict:
            return items
        try:  # its type is kept if the constructor takes a dict, as in `BatchEncoding` and `ModelOutput`
            return type(tree)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # Not the constructor: PackedSequence's checks and converts what it gets.
        return tuple.__new__(type(tree), (map_tensors(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested structure, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(tree, found.append)
    return found


def is_samples(batch: Any) -> bool:
    """Return whether a batch is a list of uncollated samples, each a mapping."""
    return isinstance(batch, list) and bool(batch) and isinstance(batch[0], (dict, Mapping))


def batch_size_of(batch: Any) -> int | None:
    """Return how many samples a batch holds, or None if that is unknown.

    The size is that of a mapping's ``"labels"``, because other tensors may count something else, such as image
    patches; without labels, the commonest among the tensors (the first of equally common ones). For a list of mappings
    it is the length, because these are samples.
    """
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() > 0 else None
    if isinstance(batch, (dict, Mapping)):
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor) and labels.dim() > 0:
            return int(labels.shape[0])
        batch = batch.values()
    elif is_samples(batch):
        return len(batch)
    elif not isinstance(batch, (list, tuple)):
        return None
    sizes: dict[int, int] = {}
    for value in batch:
        if isinstance(value, torch.Tensor):
            size = value.shape[0] if value.dim() > 0 else None
        else:
            size = batch_size_of(value)
        if size is not None:
            sizes[size] = sizes.get(size, 0) + 1
    return max(sizes, key=sizes.__getitem__) if sizes else None


def as_array(tensor: torch.Tensor) -> Any:
    """Return a tensor as a NumPy array; bfloat16, which NumPy lacks, becomes float32; synchronises."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def detach(tree: Any) -> Any:
    """Return the same structure with its tensors detached from the graph."""
    return map_tensors(tree, torch.Tensor.detach)


def is_alike(saved: Any, own: Any, *, is_deep: bool = True) -> bool:
    """Return whether a saved value can replace an object's value `own`: same kind, same length.

    None marks a value that is not set yet and matches everything; an empty list `own` matches every list.

    Args:
        is_deep: Look into lists and mappings too.
    """
    if saved is None or own is None:
        return True
    if isinstance(own, (bool, str)) or isinstance(saved, (bool, str)):
        return isinstance(saved, type(own)) and isinstance(own, type(saved))
    if _is_number(own):
        return _is_number(saved)
    if isinstance(own, torch.Tensor):
        return isinstance(saved, torch.Tensor) and saved.shape == own.shape
    if isinstance(own, Mapping):
        is_fit = isinstance(saved, Mapping)
        return is_fit and (not is_deep or all(is_alike(saved[key], own[key]) for key in own.keys() & saved.keys()))
    if isinstance(own, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or not own or not is_deep:
            return isinstance(saved, (list, tuple))
        return len(saved) == len(own) and all(map(is_alike, saved, own))
    return True


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)  # int64, as torch
    return is_plain or (isinstance(value, torch.Tensor) and value.numel() == 1)
