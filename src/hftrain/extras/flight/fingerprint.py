"""A number for a part of all weights or gradients that depends on every bit of it, and not on how they are sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hftrain.core.parameters import block_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# An odd number; its powers, and its products with an index, differ in all bits.
_MIX = -7046029254386353131


class _Span(NamedTuple):
    """The elements of one parameter that belong to a part; of the whole tensor, flattened."""

    parameter: int
    start: int
    end: int


@dataclass(frozen=True)
class _Block:
    """A process's block of a whole tensor: the shape of that, where the block begins, its own shape."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def num_before(self, position: int) -> int:
        """Return how many elements of the block come before a place in the whole tensor."""
        count, tensor_stride, block_stride = 0, math.prod(self.shape), self.num_elements
        for length, first, size in zip(self.shape, self.offsets, self.sizes, strict=True):
            if not block_stride:
                break
            tensor_stride, block_stride = tensor_stride // length, block_stride // size
            index, position = divmod(position, tensor_stride)
            count += min(max(index - first, 0), size) * block_stride
            if not first <= index < first + size:
                break
        return count

    def select(self, values: torch.Tensor, part: slice, start: int) -> torch.Tensor:
        """Return the values of a part of the block; the first of `values` is that of place `-start`."""
        if self.sizes[1:] == self.shape[1:]:
            start += self.offsets[0] * math.prod(self.shape[1:])
            span = slice(part.start + start, part.stop + start)
            return values if span == slice(0, len(values)) else values[span]
        remaining, stride = torch.arange(part.start, part.stop, device=values.device), 1
        positions = torch.full_like(remaining, start)
        for length, first, size in reversed([*zip(self.shape, self.offsets, self.sizes, strict=True)]):
            positions += (remaining % size + first) * stride
            remaining, stride = remaining // size, stride * length
        return values[positions]


class Fingerprint:
    """Sum up the bits of each element times the power of an odd number by its position in the whole model, mod 2^64.

    Each call looks at the next part of the parameters, so a few steps cover all of them. The numbers of processes that
    have shards add up to that of one process.

    Args:
        parameters: All trained parameters, in the same order on all processes; DTensors count by their own shards.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, size: int = 8192, max_tensors: int = 8) -> None:
        self.parameters = list(parameters)
        self._size, self._max_tensors = size, max_tensors
        sizes = [parameter.numel() for parameter in self.parameters]  # of the whole tensors
        self._starts = [*accumulate(sizes, initial=0)]
        self._blocks = [_local_block(parameter) for parameter in self.parameters]
        self.is_split = any(
            block is None or block.num_elements < size for block, size in zip(self._blocks, sizes, strict=True)
        )
        self._parts = list(self._split_into_parts())
        self.num_parts = len(self._parts)  # after so many steps every element has been looked at
        device = next((parameter.device for parameter in self.parameters if not parameter.is_meta), None)
        self._powers = torch.full((size,), _MIX, device=device).cumprod(0)  # modulo 2^64

    def _split_into_parts(self) -> Iterator[list[_Span]]:
        """Yield parts of at most `size` elements, of few tensors: each tensor costs several calls on the device."""
        part: list[_Span] = []
        room = self._size
        for number, parameter in enumerate(self.parameters):
            start = 0
            while start < parameter.numel():
                end = min(parameter.numel(), start + room)
                part.append(_Span(number, start, end))
                room -= end - start
                start = end
                if room == 0 or len(part) == self._max_tensors:
                    yield part
                    part, room = [], self._size
        if part:
            yield part

    @torch.no_grad()
    def of(self, step: int) -> torch.Tensor:
        """Return the numbers of a step's part of this process: of the weights, and of the gradients if it has any.

        A parameter without a gradient, or with a sparse one, then counts as one whose gradient is zero.
        """
        spans = self._parts[step % len(self._parts)] if self._parts else []
        gradients, weights, powers, has_any = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor](), False
        for span in spans:
            parameter, block = self.parameters[span.parameter], self._blocks[span.parameter]
            if block is None:
                continue
            part = slice(block.num_before(span.start), block.num_before(span.end))
            if part.start == part.stop:
                continue
            weights.append(_local(parameter)[part])
            gradient = None if parameter.grad is None or parameter.grad.is_sparse else parameter.grad
            has_any |= gradient is not None
            gradients.append(torch.zeros_like(weights[-1]) if gradient is None else _local(gradient)[part])
            powers.append(block.select(self._powers, part, self._starts[span.parameter] - self._start_of(spans)))
        if not weights:
            return torch.zeros(2, dtype=torch.int64, device=self._powers.device)
        rows = [_joined(tensors) for tensors in (weights, gradients)[: 1 + has_any]]
        rows = rows if len({row.dtype for row in rows}) == 1 else [_bits(row) for row in rows]
        return (_bits(torch.stack(rows)) * _joined(powers).to(rows[0].device)).sum(1)

    def _start_of(self, spans: list[_Span]) -> int:
        return self._starts[spans[0].parameter] + spans[0].start

    def text_of(self, step: int, number: int) -> str:
        """Return a number of `of` as that of the place of its part in the model, in hexadecimal."""
        start = self._start_of(self._parts[step % len(self._parts)]) if self._parts else 0
        return f"{number * pow(_MIX, start, 2**64) % 2**64:016x}"


@torch.no_grad()
def tensor_fingerprint(tensor: torch.Tensor) -> str:
    """Return the fingerprint of one tensor, of this process's part of it, as hexadecimal text; synchronises."""
    local = _local(tensor)
    flat = torch.view_as_real(local).reshape(-1) if local.is_complex() else local
    bits = _bits(flat.view(torch.uint8) if flat.dtype is torch.bool else flat)
    factors = (torch.arange(len(bits), device=bits.device) * _MIX) | 1
    return f"{int((bits * factors).sum()) % 2**64:016x}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.reshape(-1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(_BITS[tensor.element_size()]).to(torch.int64)
    return bits if bits.shape == tensor.shape else 3 * bits[..., ::2] + bits[..., 1::2]  # of complex128


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Return one tensor of all pieces, or of their bits if their types differ; with few calls, as each is cold."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces if len({piece.dtype for piece in pieces}) == 1 else [_bits(piece) for piece in pieces])


def _local_block(parameter: Any) -> _Block | None:
    """Return which elements of the whole tensor this process counts; None if that is not known.

    Of replicas, the first one counts; of a parameter that another stage of a pipeline holds, nothing.
    """
    shape = tuple(parameter.shape) or (1,)
    if parameter.is_meta or getattr(parameter, "is_copy", False):
        return _Block(shape, (0,) * len(shape), (0,) * len(shape))
    if not hasattr(parameter, "device_mesh"):
        return _Block(shape, (0,) * len(shape), shape)
    coordinate, placements = parameter.device_mesh.get_coordinate() or (), parameter.placements
    if any(placement.is_partial() for placement in placements):
        return None
    offsets, sizes = block_of(parameter)
    is_copy = any(coordinate[dim] for dim, placement in enumerate(placements) if placement.is_replicate())
    return _Block(shape, offsets or (0,), (0,) * len(shape) if is_copy else sizes or (1,))
