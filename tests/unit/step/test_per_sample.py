"""Optimizers that clip the gradient of each sample, as Opacus' do, get the loss as it is, or are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from hftrain import ConfigError, Trainer
from hftrain.precision.registry import precisions
from hftrain.step.legality import check_per_sample


class Private(torch.optim.SGD):
    """Keeps the gradients that it gets, and divides their sum by the number of micro-batches, as Opacus does."""

    accumulated = 2

    def signal_skip_step(self, do_skip: bool = True) -> None: ...

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= self.accumulated
        return super().step(closure)


def train(folder: Path, kind: type[Trainer], model: Any = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or Net()
    optimizer = Private(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    args = make_arguments(folder, max_steps=2, gradient_accumulation_steps=2, max_grad_norm=0.0)
    trainer = kind(model, args, train_dataset=make_rows(16), optimizers=(optimizer, schedule), **more)
    trainer.train()
    return trainer


class Declares(Trainer):
    loss_is_scaled_for_ga = True


class ByHand(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = model(**self._prepare_inputs(inputs))[0]
        loss.backward()
        return loss.detach() / 2


def test_accumulation_is_refused_unless_the_loss_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot use Private.*steps=2 before it clips.*loss_is_scaled_for_ga = True"):
        train(tmp_path, Trainer)
    for model in (Task(), None):
        with pytest.raises(ConfigError, match="without count_items"):
            train(tmp_path, Declares, model, **({} if model else {"count_items": "samples"}))


@pytest.mark.parametrize("kind", [Declares, ByHand])
def test_loss_reaches_the_backward_pass_undivided(tmp_path: Path, kind: type[Trainer]) -> None:
    trained = train(tmp_path, kind)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in zip(*[iter(trained.get_train_dataloader())] * 2, strict=True):
        for batch in batches:
            (model(**batch)[0] / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(trained.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("ranks", "precision", "reason"), [(2, "fp32", "2 processes weigh the loss"), (1, "fp16", "'fp16' scales the loss")]
)
def test_several_processes_and_loss_scales_are_refused(ranks: int, precision: str, reason: str) -> None:
    strategy: Any = SimpleNamespace(world_size=ranks)
    optimizer = Private(Net().parameters())
    with pytest.raises(ConfigError, match=reason):
        check_per_sample(optimizer, strategy, precisions.create(precision), accumulation=1)


class Draws(Sampler[list[int]]):
    """Batches of any size, as Poisson sampling draws them."""

    def __iter__(self) -> Any:
        yield from ([0, 1], [2], [], [3, 4, 5])


class Splits(Sampler[list[int]]):
    """Opacus' BatchSplittingSampler, but for the splitting."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.optimizer = sampler, Private(Net().parameters())

    def __iter__(self) -> Any:
        return iter(self.sampler)

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("is_random", [True, False])
def test_parts_of_batches_of_unknown_size_are_refused(tmp_path: Path, is_random: bool) -> None:
    rows: Any = make_rows(16)
    sampler = Draws() if is_random else BatchSampler(RandomSampler(rows), 4, drop_last=False)
    loader = DataLoader(rows, batch_sampler=Splits(sampler))

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    trainer = Own(Net(), make_arguments(tmp_path, num_train_epochs=1))
    if not is_random:
        trainer.train()
        assert trainer.state.global_step == 4
        return
    with pytest.raises(ConfigError, match=r"Cannot count the updates of a Splits.*poisson_sampling=False"):
        trainer.train()
