"""Loaders that `accelerator.prepare` returned: the same data, saved, and resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from support.resuming import check_resumes
from support.tiny import Net, Noisy, Stream, make_arguments, make_rows
from torch.utils.data import BatchSampler, DataLoader

from hftrain import Trainer, set_seed
from hftrain.data.sharding import ShardPlan


class ByEpoch(BatchSampler):
    """Batches in an order drawn from a seed and the epoch, as sentence-transformers' samplers make them."""

    def __init__(self, num: int, *, batch_size: int = 4) -> None:
        super().__init__(range(num), batch_size, drop_last=False)
        self.generator, self.seed, self.epoch = torch.Generator(), 3, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.sampler), generator=self.generator).tolist()
        return iter([order[start : start + 4] for start in range(0, len(order), 4)])


class Own(Trainer):
    make_loader: Callable[[Any], Any]

    def get_train_dataloader(self) -> Any:
        return self.make_loader(self.accelerator)


def shuffled() -> Any:
    return DataLoader(make_rows(), batch_size=4, shuffle=True)


LOADERS: dict[str, Callable[[Any], Any]] = {
    "shuffled": lambda accelerator: accelerator.prepare(shuffled()),
    "batch sampler": lambda a: a.prepare(DataLoader(make_rows(), batch_sampler=ByEpoch(22))),
    "random data": lambda a: a.prepare(DataLoader(Noisy(make_rows()), batch_size=4, shuffle=True)),
    "random data in workers": lambda a: a.prepare(
        DataLoader(Noisy(make_rows()), batch_size=4, shuffle=True, num_workers=2)
    ),
    "stream": lambda a: a.prepare(DataLoader(Stream(make_rows()), batch_size=4)),
    "dispatched": lambda a: Accelerator(
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    ).prepare(shuffled()),
    "shortened": lambda a: skip_first_batches(a.prepare(shuffled()), 2),
    "shortened stream": lambda a: skip_first_batches(a.prepare(DataLoader(Stream(make_rows()), batch_size=4)), 2),
    "shortened plain stream": lambda a: skip_first_batches(DataLoader(Stream(make_rows()), batch_size=4), 2),
}  # fmt: skip


def make(folder: Path, name: str, *callbacks: Any) -> Own:
    set_seed(1)
    arguments = make_arguments(folder, max_steps=17, save_strategy="steps", save_steps=1000)
    trainer = Own(Net(dropout=0.2), arguments, train_dataset=make_rows(), callbacks=list(callbacks))
    trainer.make_loader = LOADERS[name]
    return trainer


@pytest.mark.parametrize("name", LOADERS)
def test_prepared_loader_goes_on_exactly(tmp_path: Path, name: str) -> None:
    check_resumes(lambda folder, *callbacks: make(folder, name, *callbacks), tmp_path, [3, 8])


@pytest.mark.parametrize("name", ["shuffled", "dispatched", "stream"])
def test_prepared_loader_of_one_process_is_read_as_torchs_own(name: str) -> None:
    loader = ShardPlan().share(LOADERS[name](Accelerator()))
    assert not type(loader).__module__.startswith("accelerate.")  # whose loaders call themselves torch loaders
