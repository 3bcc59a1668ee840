from __future__ import annotations

import functools
import os
import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from hftrain.core.seed import preserved_rng
from hftrain.data.seeding import SeededBatches, derive_seed, start_worker


def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_derive_seed_tells_all_parts_apart():
    assert len({derive_seed(a, b, c) for a in range(4) for b in range(4) for c in range(4)}) == 64
    assert 0 <= derive_seed(-1, 2**63) < 2**32


@pytest.mark.parametrize("change", [{"worker_id": 1}, {"rank": 1}, {"seed": 1}])
def test_start_worker_depends_on_worker_rank_and_seed(change):
    options = {"worker_id": 0, "rank": 0, "seed": 0}
    with preserved_rng():
        start_worker(**options)
        first = draw()
        start_worker(**{**options, **change})
        assert draw() != first


def test_seeded_batches_seed_only_where_they_are_unpacked():
    batches = SeededBatches(BatchSampler(SequentialSampler(range(5)), 2, False), seed=0, rank=0)
    with preserved_rng():
        before = torch.get_rng_state()
        plain = list(batches)
        assert torch.equal(torch.get_rng_state(), before)
        assert plain == [[0, 1], [2, 3], [4]]
        assert len(batches) == 3

        sent = pickle.dumps(plain[1])
        draws = []
        for _ in range(2):
            assert pickle.loads(sent) == [2, 3]
            draws.append(draw())
        assert draws[0] == draws[1]


def test_seeded_batches_send_other_seeds_per_place_epoch_and_rank():
    def first_draws(rank, epoch):
        batches = SeededBatches([[0], [1]], seed=0, rank=rank)
        batches.set_epoch(epoch)
        for batch in batches:
            pickle.loads(pickle.dumps(batch))
            yield draw()

    with preserved_rng():
        seen = [numbers for rank in (0, 1) for epoch in (0, 1) for numbers in first_draws(rank, epoch)]
    assert len(set(seen)) == 8


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
