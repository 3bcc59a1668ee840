"""The collectives of all processes, or of those that read different samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hftrain.core.errors import StrategyError
from hftrain.strategies import collectives
from hftrain.strategies.base import Ranks


class GroupRanks(Ranks):
    """The processes of a torch process group."""

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        return collectives.reduce(tensor, op=op, device=self.device, group=self.group)

    def reduce_later(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
        if self.world_size == 1:
            return super().reduce_later(tensor)
        return collectives.sum_later(tensor, self.device, group=self.group)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = super().gather(tensor)
        return tensor if self.world_size == 1 else collectives.gather(tensor, device=self.device, group=self.group)

    def gather_object(self, obj: Any) -> list[Any]:
        return [obj] if self.world_size == 1 else collectives.gather_object(obj, device=self.device, group=self.group)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1:
            return obj
        return collectives.broadcast_object(obj, src=src, device=self.device, group=self.group)

    def barrier(self) -> None:
        if self.world_size > 1:
            # Without device_ids NCCL guesses the device and warns.
            is_nccl = dist.get_backend(self.group) == "nccl"
            dist.barrier(self.group, device_ids=[self.device.index] if is_nccl else None)

    def all_true(self, flag: bool) -> bool:
        return flag if self.world_size == 1 else not self.reduce(torch.tensor(int(not flag)), "max").item()


class DataRanks(GroupRanks):
    """One process for each data coordinate of a mesh: those that differ from this one only in the samples they read.

    Every process has its own `DataRanks`. The other processes of a data coordinate, which hold other parts of the model
    or of the sequence, read the same samples and form a `DataRanks` of their own with equal counts.

    Args:
        whole: All processes, which know the device.
        rank: The data coordinate of this process.
        world_size: The number of data coordinates.
        copy: The number of this process among those of its data coordinate.
    """

    def __init__(self, whole: Ranks, *, rank: int, world_size: int, copy: int) -> None:
        self._whole, self.rank, self.world_size, self.copy = whole, rank, world_size, copy
        self._group: ProcessGroup | None = None

    def join(self, group: ProcessGroup) -> None:
        """Use a process group, whose ranks are the data coordinates, from now on."""
        self._group = group

    @property
    def device(self) -> torch.device:
        return self._whole.device

    @property
    def group(self) -> ProcessGroup:
        """The process group.

        Raises:
            StrategyError: Not launched yet.
        """
        if self._group is None:
            raise StrategyError(
                f"Cannot exchange values between {self.world_size} data ranks.",
                "Their process group does not exist yet.",
                "Call launch() of the strategy first.",
            )
        return self._group
