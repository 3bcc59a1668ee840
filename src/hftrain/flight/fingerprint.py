"""A number for a part of all weights or gradients that depends on every bit of it, and not on how they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# An odd number; products of it with an index differ in all bits.
_MIX = -7046029254386353131


class Fingerprint:
    """Sum up the bits of each element times an odd number that follows from its position in the whole model, mod 2^64.

    Each call looks at the next part of the parameters, so a few steps cover all of them. The numbers of processes that
    have shards add up to that of one process.

    Args:
        parameters: All trained parameters, in the same order on all processes; DTensors count by their own shards.
        size: Elements in a part.
        most: Tensors in a part.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, size: int = 8192, most: int = 8) -> None:
        self.parameters = list(parameters)
        self._size, self._most = size, most
        starts = [0]
        for each in self.parameters:
            starts.append(starts[-1] + each.numel())  # of the whole tensor
        self._starts = starts
        self._own = [_own_range(each) for each in self.parameters]
        self.is_split = any(
            own is None or len(own) < each.numel() for own, each in zip(self._own, self.parameters, strict=True)
        )
        self._windows = list(self._cut())

    def _cut(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yield the parts: of each tensor in one its number, first element and end."""
        part: list[tuple[int, int, int]] = []
        left = self._size
        for number, each in enumerate(self.parameters):
            done = 0
            while done < each.numel():
                end = min(each.numel(), done + left)
                part.append((number, done, end))
                left -= end - done
                done = end
                if left == 0 or len(part) == self._most:
                    yield part
                    part, left = [], self._size
        if part:
            yield part

    @property
    def num_parts(self) -> int:
        """After how many steps every element has been looked at."""
        return len(self._windows)

    @torch.no_grad()
    def of(self, step: int) -> torch.Tensor:
        """Return the numbers of a step's part of this process: of the weights, and of the gradients if it has any.

        A parameter without a gradient, or with a sparse one, then counts as one whose gradient is zero.
        """
        gradients, weights, places = list[torch.Tensor](), list[torch.Tensor](), list[tuple[int, int]]()
        has_any = False
        for number, first, end in self._windows[step % len(self._windows)] if self._windows else ():
            parameter, own = self.parameters[number], self._own[number]
            if own is None or first >= own.stop or end <= own.start:
                continue
            first, end, start = max(first, own.start), min(end, own.stop), self._starts[number]
            part = slice(first - own.start, end - own.start)
            places.append((start + first, start + end))
            weights.append(_local(parameter)[part])
            gradient = None if parameter.grad is None or parameter.grad.is_sparse else parameter.grad
            has_any |= gradient is not None
            gradients.append(torch.zeros_like(weights[-1]) if gradient is None else _local(gradient)[part])
        if not places:
            return torch.zeros(2, dtype=torch.int64)
        bits = _bits([*weights, *gradients] if has_any else weights)
        return (bits.view(1 + has_any, -1) * _factors(places, weights[0].device)).sum(1)


def of_tensor(tensor: torch.Tensor) -> str:
    """Return the fingerprint of one tensor, of this process's part of it, as hexadecimal text; synchronises."""
    local = _local(tensor)
    flat = torch.view_as_real(local).reshape(-1) if local.is_complex() else local
    bits = _bits([flat.view(torch.uint8) if flat.dtype is torch.bool else flat])
    return f"{int((bits * _factors([(0, len(bits))], bits.device)).sum()) % 2**64:016x}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach().reshape(-1)


def _bits(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Return the bits of all elements; as few calls as possible, because each is cold in a step."""
    if len({each.dtype for each in pieces}) > 1:
        return torch.cat([_bits([each]) for each in pieces])
    flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    return bits if len(bits) == len(flat) else 3 * bits[::2] + bits[1::2]  # of complex128


def _factors(places: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return the odd numbers of places in the model."""
    found = [torch.arange(*each, device=device) for each in places]
    return ((found[0] if len(found) == 1 else torch.cat(found)) * _MIX) | 1


def _own_range(parameter: torch.Tensor) -> range | None:
    """Return which elements of the whole tensor this process counts; None if that is not known.

    Of replicas, the first one counts.
    """
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return range(parameter.numel())
    rows, coordinate = range(parameter.shape[0] if parameter.dim() else 1), parameter.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            rows = rows if coordinate[dim] == 0 else rows[:0]
        elif type(placement).__name__ == "Shard" and placement.dim == 0:
            size = -(-len(rows) // parameter.device_mesh.size(dim))  # type: ignore[attr-defined]
            rows = rows[coordinate[dim] * size : (coordinate[dim] + 1) * size]
        else:
            return None
    per_row = parameter.numel() // max(1, parameter.shape[0] if parameter.dim() else 1)
    return range(rows.start * per_row, rows.stop * per_row)
