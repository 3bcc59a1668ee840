"""Loaders that begin in the middle of an epoch, and how many samples a micro-step holds."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from hftrain.core.errors import CheckpointError
from hftrain.data.states import begin_at


def test_what_cannot_begin_at_a_sample_is_refused() -> None:
    with pytest.raises(CheckpointError, match="list, which iterates in its own way"):
        begin_at([[1, 2]], offset=1)
    with pytest.raises(CheckpointError, match="DistributedSampler, which batches or shards the data itself"):
        begin_at(DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=2, rank=0)), offset=1)
