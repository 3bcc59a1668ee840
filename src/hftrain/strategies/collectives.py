"""Collectives that `torch.distributed` does not provide in this form, over a group or all processes.

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

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_MAX_DIMS = 8
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def reduce(tensor: torch.Tensor, *, op: str, device: torch.device, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum, mean or maximum over all ranks; does not change the input."""
    result = tensor.detach().to(device, copy=True)
    dist.all_reduce(result, _REDUCE_OPS[op], group)
    return result / dist.get_world_size(group) if op == "mean" else result


def sum_later(
    tensor: torch.Tensor, device: torch.device, group: ProcessGroup | None = None
) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Start to sum a tensor over all ranks; return the result tensor and a function that waits for it."""
    result = tensor.detach().to(device, copy=True, non_blocking=True)
    return result, dist.all_reduce(result, dist.ReduceOp.SUM, group, async_op=True).wait


def gather(tensor: torch.Tensor, *, device: torch.device, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return the rows of all ranks in rank order; a rank without rows may have any trailing shape and dtype."""
    tensor = tensor.detach().to(device)
    headers = _gather_headers(tensor, device=device, group=group)
    lengths = [header[1] for header in headers]
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
    padded = torch.zeros(max(lengths), *trailing, dtype=_DTYPES[dtype], device=device)
    if len(tensor):
        padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def gather_object(obj: Any, *, device: torch.device, group: ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks in rank order."""
    # json.dumps writes a single line, so line breaks only occur between ranks.
    lines = gather(_encode(json.dumps(obj) + "\n"), device=device, group=group)
    return [json.loads(line) for line in _decode(lines).splitlines()]


def broadcast_object(obj: Any, *, src: int, device: torch.device, group: ProcessGroup | None = None) -> Any:
    """Return the object of rank `src` of the group, after a JSON round trip, on every rank."""
    payload = _encode(json.dumps(obj) if dist.get_rank(group) == src else "").to(device)
    length = torch.tensor(len(payload), device=device)
    dist.broadcast(length, group=group, group_src=src)
    if dist.get_rank(group) != src:
        payload = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(payload, group=group, group_src=src)
    return json.loads(_decode(payload))


def _gather_headers(tensor: torch.Tensor, *, device: torch.device, group: ProcessGroup | None) -> list[list[int]]:
    """Return every rank's dtype (its index in `_DTYPES`) and shape."""
    header = [_DTYPES.index(tensor.dtype), *tensor.shape]
    mine = torch.tensor([len(header), *header, *[0] * (_MAX_DIMS - tensor.dim())], device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group)
    return [fields[:length] for length, *fields in torch.stack(rows).tolist()]


def _encode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _decode(data: torch.Tensor) -> str:
    return data.cpu().numpy().tobytes().decode("ascii")
