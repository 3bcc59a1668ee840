"""The collectives of all processes, or of those that read different samples.

Objects are sent as JSON, never as pickles, so that data from another machine cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hftrain.core.errors import StrategyError
from hftrain.strategies.base import Ranks

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_MAX_DIMS = 8
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


class GroupRanks(Ranks):
    """The processes of a torch process group."""

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        result = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(result, _REDUCE_OPS[op], self.group)
        return result / self.world_size if op == "mean" else result

    def reduce_later(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
        if self.world_size == 1:
            return super().reduce_later(tensor)
        result = tensor.detach().to(self.device, copy=True, non_blocking=True)
        return result, dist.all_reduce(result, dist.ReduceOp.SUM, self.group, async_op=True).wait

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = super().gather(tensor)
        if self.world_size == 1:
            return tensor
        tensor = tensor.detach().to(self.device)
        headers = self._gather_headers(tensor)
        lengths = [header[1] for header in headers]
        # A rank without rows may have any trailing shape and dtype.
        kinds = {(header[0], *header[2:]) for header in headers if header[1]}
        if len(kinds) > 1:
            raise StrategyError(
                "Tensors of all processes were to be gathered.",
                "They differ in more than their number of rows.",
                "Pad them to one shape, and cast them to one dtype, first.",
                kinds=[(_DTYPES[dtype], *trailing) for dtype, *trailing in sorted(kinds)],
            )
        if not kinds:
            return tensor
        dtype, *trailing = kinds.pop()
        padded = torch.zeros(max(lengths), *trailing, dtype=_DTYPES[dtype], device=self.device)
        if len(tensor):
            padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, self.group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def gather_object(self, obj: Any) -> list[Any]:
        if self.world_size == 1:
            return [obj]
        # json.dumps writes a single line, so line breaks only occur between ranks.
        lines = self.gather(_encode(json.dumps(obj) + "\n"))
        return [json.loads(line) for line in _decode(lines).splitlines()]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1:
            return obj
        payload = _encode(json.dumps(obj) if self.rank == src else "").to(self.device)
        length = torch.tensor(len(payload), device=self.device)
        dist.broadcast(length, group=self.group, group_src=src)
        if self.rank != src:
            payload = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(payload, group=self.group, group_src=src)
        return json.loads(_decode(payload))

    def barrier(self) -> None:
        if self.world_size > 1:
            # Without device_ids NCCL guesses the device and warns.
            is_nccl = dist.get_backend(self.group) == "nccl"
            dist.barrier(self.group, device_ids=[self.device.index] if is_nccl else None)

    def all_true(self, flag: bool) -> bool:
        return flag if self.world_size == 1 else not self.reduce(torch.tensor(int(not flag)), "max").item()

    def _gather_headers(self, tensor: torch.Tensor) -> list[list[int]]:
        """Return every rank's dtype (its index in `_DTYPES`) and shape."""
        header = [_DTYPES.index(tensor.dtype), *tensor.shape]
        mine = torch.tensor([len(header), *header, *[0] * (_MAX_DIMS - tensor.dim())], device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, self.group)
        return [fields[:length] for length, *fields in torch.stack(rows).tolist()]


class MemberRanks(GroupRanks):
    """The processes of any group that this one belongs to."""

    device: Any = None

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)


class DataRanks(GroupRanks):
    """One process for each data coordinate of a mesh: those that differ from this one only in the samples they read.

    Every process has its own `DataRanks`. The other processes of a data coordinate, which hold other parts of the model
    or of the sequence, read the same samples and form a `DataRanks` of their own with equal counts. The strategy's
    `launch` sets `group`, whose ranks are the data coordinates.

    Args:
        whole: All processes, which know the device.
        rank: The data coordinate of this process.
        world_size: The number of data coordinates.
        copy: The number of this process among those of its data coordinate.
    """

    def __init__(self, whole: Ranks, *, rank: int, world_size: int, copy: int) -> None:
        self._whole, self.rank, self.world_size, self.copy = whole, rank, world_size, copy

    @property
    def device(self) -> torch.device:
        return self._whole.device


def _encode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _decode(data: torch.Tensor) -> str:
    return data.cpu().numpy().tobytes().decode("ascii")
