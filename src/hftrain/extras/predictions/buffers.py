"""Arrays that grow by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from hftrain.core.errors import TaskError

PADDING = -100
# Types that cannot hold -100; padding makes them int64.
_UNSIGNED = {torch.bool, torch.uint8}

Array = numpy.ndarray[Any, Any]


class Rows:
    """Collect rows of one stream of host tensors, padded with -100 on the right if their lengths differ.

    If their number is known, space for all rows is allocated at once, so that no copy is needed.
    """

    def __init__(self, *, num_expected: int = 0) -> None:
        self.batch_sizes: list[int] = []
        self._num_expected = num_expected
        self._length = 0
        self._array: Array | None = None

    def append(self, rows: torch.Tensor) -> None:
        """Add a batch of rows; bfloat16, which NumPy lacks, becomes float32."""
        rows = rows.float() if rows.dtype is torch.bfloat16 else rows
        space = self._space_for(rows)[self._length : self._length + len(rows)]
        _fill(space, rows)
        self._length += len(rows)
        self.batch_sizes.append(len(rows))

    def array(self) -> Array:
        """Return the rows added so far; requires at least one batch."""
        assert self._array is not None
        return self._array[: self._length]

    def _space_for(self, rows: torch.Tensor) -> torch.Tensor:
        needed = self._length + len(rows)
        if self._array is None:
            length = max(self._num_expected, needed)
            self._array = allocate((length, *rows.shape[1:]), rows.dtype)
            return torch.from_numpy(self._array)
        space = torch.from_numpy(self._array)
        shape, dtype = common_kind([space, rows])
        if needed <= len(space) and list(space.shape[1:]) == shape and space.dtype is dtype:
            return space
        # More than is needed, so that rows are rarely copied; untouched memory costs nothing.
        length = len(space) if needed <= len(space) else max(needed, len(space) * 3 // 2)
        self._array = allocate((length, *shape), dtype)
        wider = torch.from_numpy(self._array)
        _fill(wider[: self._length], space[: self._length])
        return wider


def common_kind(tensors: Sequence[torch.Tensor]) -> tuple[list[int], torch.dtype]:
    """Return the trailing shape and the dtype that hold the rows of all tensors.

    Raises:
        TaskError: They differ in their number of dimensions.
    """
    if len({tensor.dim() for tensor in tensors}) > 1:
        raise TaskError(
            "Predictions of several batches were to be joined.",
            "They differ in their number of dimensions, so padding cannot align them.",
            "Return outputs of one number of dimensions, leave this one out with ignore_keys or "
            "preprocess_logits_for_metrics, or set eval_do_concat_batches=False.",
            shapes=[tuple(tensor.shape) for tensor in tensors],
        )
    shapes = [list(tensor.shape[1:]) for tensor in tensors]
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if dtype in _UNSIGNED and any(shape != widest for shape in shapes):
        dtype = torch.int64
    return widest, dtype


def padded(rows: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a trailing shape and dtype, padded with -100 on the right."""
    result = torch.empty((len(rows), *shape), dtype=dtype)
    _fill(result, rows)
    return result


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Array:
    """Return an uninitialised array."""
    return numpy.empty(shape, torch.empty(0, dtype=dtype).numpy().dtype)


def _fill(space: torch.Tensor, rows: torch.Tensor) -> None:
    if space.shape != rows.shape:
        space.fill_(PADDING)
    space[tuple(slice(0, size) for size in rows.shape)] = rows
