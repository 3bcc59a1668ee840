from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from support.loading import build
from torch.utils.data import DataLoader, Dataset

from hftrain.data.feed import TrainFeed
from hftrain.data.seeding import SeededCollator, start_worker


@pytest.mark.skipif(not hasattr(os, "setpgid"), reason="needs process groups")
def test_worker_leads_a_process_group_of_its_own():
    # What signals a group reaches the process that trains, and not its workers.
    loader = DataLoader(
        ProcessGroups(), batch_size=None, num_workers=1, worker_init_fn=functools.partial(start_worker, rank=0)
    )
    before = os.getpgrp()
    assert before not in [int(group) for group in loader]
    start_worker(0, rank=0)
    assert os.getpgrp() == before


class ProcessGroups(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return os.getpgrp()


class Masking:
    """Has of transformers' collator what draws; the real one is in the interop tests."""

    generator: torch.Generator | None = None

    def __init__(self, seed: int | None = 7) -> None:
        self.seed = seed

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        return self.torch_mask_tokens(torch.tensor([row["input_ids"] for row in rows]))

    def torch_mask_tokens(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.bernoulli(torch.full(inputs.shape, 0.5), generator=self.generator)


ROWS = [{"input_ids": list(range(start, start + 12))} for start in range(10)]


def feed(**options: Any) -> TrainFeed:
    return TrainFeed(build(ROWS, collate=SeededCollator(Masking()), batch_size=3, **options), seed=1)


def read(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_masks_depend_on_epoch_and_content_alone(num_workers: int) -> None:
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    steady = feed(**workers)
    epochs = [read(steady.open(epoch)) for epoch in (0, 1)]
    torch.manual_seed(99)
    alone = feed()
    assert [read(alone.open(epoch)) for epoch in (0, 1)] == epochs
    assert read(feed(**workers).open(1, skip=2)) == epochs[1][2:]
