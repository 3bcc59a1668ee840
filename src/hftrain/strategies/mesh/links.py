"""The connections of a pipeline's stage to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hftrain.strategies.ranks import MemberRanks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8


class Links:
    """The connections of a stage to the others; stages are named by their distance."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[torch.Tensor]:
        """Send tensors to stages, fill others with what stages send, and return these."""
        operations = [dist.P2POp(dist.isend, x.contiguous(), self._global(step), self.group) for x, step in sends]
        operations += [dist.P2POp(dist.irecv, x, self._global(step), self.group) for x, step in receives]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [x for x, _ in receives]

    def tell(self, hidden: torch.Tensor) -> None:
        """Send the next stage the dtype and shape of what follows."""
        header = [_DTYPES.index(hidden.dtype), hidden.dim(), *hidden.shape, *[0] * (_MAX_DIMS - hidden.dim())]
        self.exchange([(torch.tensor(header, device=hidden.device), +1)], [])

    def hear(self, device: torch.device) -> torch.Tensor:
        """Return a tensor like what the stage before sends next, without content."""
        header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=device)
        kind, dims, *shape = self.exchange([], [(header, -1)])[0].tolist()
        return torch.empty(shape[:dims], dtype=_DTYPES[kind], device="meta")

    def broadcast_object(self, value: Any, device: torch.device) -> Any:
        """Return the last stage's value, after a JSON round trip."""
        return MemberRanks(self.group, device).broadcast_object(value, self.size - 1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's tensor."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, self._global(self.size - 1 - self.rank), self.group)
        return tensor

    def _global(self, step: int) -> int:
        return dist.get_global_rank(self.group, self.rank + step)
