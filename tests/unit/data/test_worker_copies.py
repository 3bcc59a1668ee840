"""Streams that each loader worker reads whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hftrain.data.feed import TrainFeed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")


class Numbers(IterableDataset[dict[str, Any]]):
    """Counts to 24; a kind of share for each worker."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker: Any = get_worker_info()
        for number in range(24):
            if self.kind == "split" and number % worker.num_workers != worker.id:
                continue
            x = torch.full((3,), 0.0 if self.kind == "dummy" else float(number))
            noise = torch.randn(3) if self.kind == "noisy" else 0.0
            yield {"x": x + noise, "name": f"sample {int(x[0])}"}


def read(kind: str, num_workers: int, **options: Any) -> list[torch.Tensor]:
    loader = DataLoader(Numbers(kind), batch_size=2, num_workers=num_workers)
    return [batch.pop("x")[0, 0] for batch in TrainFeed(loader, seed=0).open(0, **options)]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_stream_that_each_worker_reads_whole_is_named(num_workers: int) -> None:
    with pytest.warns(UserWarning, match=rf"Each of the {num_workers} loader workers reads the whole Numbers.*get_wo"):
        found = read("whole", num_workers)
    assert len(found) == 12 * num_workers


@pytest.mark.parametrize(("kind", "num_workers"), [("split", 2), ("noisy", 2), ("dummy", 2), ("whole", 1)])
def test_streams_that_are_right_warn_of_nothing(kind: str, num_workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(kind, num_workers)) in (12, 12 * num_workers)
