"""A strategy without a mesh of which pairs of processes read the same samples, as the parts of one model would."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hftrain.strategies.ddp import DDPStrategy
from hftrain.strategies.ranks import DataRanks

COPIES = 2


class PairedStrategy(DDPStrategy):
    """Train with DDP on processes of which 0 and 1, 2 and 3, ... read the same samples."""

    name = "paired"
    data: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        rank, copy = divmod(self.rank, COPIES)
        self.data = DataRanks(self, rank=rank, world_size=self.world_size // COPIES, copy=copy)

    def launch(self) -> None:
        if self._device is None:
            super().launch()
            groups = [dist.new_group(list(range(copy, self.world_size, COPIES))) for copy in range(COPIES)]
            self.data.group = groups[self.rank % COPIES]
