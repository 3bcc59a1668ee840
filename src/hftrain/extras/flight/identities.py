"""The hashes of samples that have no index: those of streams, and of data that the main process reads for all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hftrain.core.errors import TaskError
from hftrain.data.columns import CollatorWrapper


class NamedBatch(NamedTuple):
    """A batch on its way from a loader, with the hashes of its samples."""

    batch: Any
    samples: list[str | None]


class NamingCollator(CollatorWrapper):
    """Collate without excluded samples, and say which ones were collated; runs where the samples are read.

    Args:
        is_whole: It gets whole samples or batches, one each (`batch_size=None`), not lists of them.
        excluded: The hashes of samples to leave out.

    Attributes:
        is_naming: Whether to return `NamedBatch`.
    """

    def __init__(self, data_collator: Any, *, is_whole: bool, excluded: frozenset[Any]) -> None:
        super().__init__(data_collator)
        self.is_naming = False
        self._is_whole, self._excluded = is_whole, excluded

    def __call__(self, samples: Any) -> Any:
        names = [hash_of(sample) for sample in ([samples] if self._is_whole else samples)]
        if not self._excluded.isdisjoint(names):
            positions = [position for position, name in enumerate(names) if name not in self._excluded]
            if not positions:
                raise TaskError(
                    "A batch of a stream has nothing left.",
                    f"All its {len(names)} samples are in exclude_samples.",
                    "Use larger batches, or leave the samples out of the stream itself.",
                )
            samples, names = [samples[position] for position in positions], [names[position] for position in positions]
        batch = self.data_collator(samples)
        return NamedBatch(batch, names) if self.is_naming else batch


def hash_of(sample: Any) -> str | None:
    """Return a hash of a sample's content, 16 hexadecimal digits; None if it has parts that cannot be compared.

    Example:
        >>> hash_of({"x": torch.ones(2), "id": 7}) == hash_of({"id": 7, "x": torch.ones(2)})
        True
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        _add(digest, sample)
    except Exception:  # objects without attributes of their own, sparse tensors, cycles, ...
        return None
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add a value's content with its types and sizes, so that differently nested samples have different hashes."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(repr(name).encode())
            _add(digest, value[name])
    elif isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, (int, float, str, bytes)) for item in value):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, (int, float, str, bytes, list, tuple, type(None))):
        digest.update(repr(value).encode())
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of Pillow
        digest.update(f"{value.mode}{value.size}".encode() + value.tobytes())
    elif not callable(value):
        digest.update(type(value).__qualname__.encode())
        _add(digest, vars(value))
    else:
        raise TypeError(value)
