"""A pass that ends before its last batch is an error, or for data that only states a length a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import MapRows, Net, make_arguments, make_rows
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from hftrain import Engine, Trainer
from hftrain.core.errors import TaskError

NUM = 40


class Reader(MapRows):
    """Takes what it gives from an iterator, which may be used up."""

    def __init__(self, num: int) -> None:
        super().__init__(make_rows(NUM))
        self.source = iter(range(num))

    def __getitem__(self, index: int) -> Any:
        next(self.source)
        return self.rows[index]


class Collator:
    def __init__(self, num: int) -> None:
        self.source = iter(range(num))

    def __call__(self, rows: list[Any]) -> Any:
        next(self.source)
        return default_collate(rows)


class Short(Sampler[int]):
    def __iter__(self) -> Any:
        source = iter(range(18))
        return map(lambda index: (next(source), index)[1], range(NUM))  # noqa: C417  (a generator would not end)

    def __len__(self) -> int:
        return NUM


class Stream(IterableDataset[Any]):
    def __init__(self, num: int, stated: int) -> None:
        self.num, self.stated = num, stated

    def __iter__(self) -> Any:
        return iter(make_rows(self.num))

    def __len__(self) -> int:
        return self.stated


def make(folder: Path, where: str, **options: Any) -> Trainer:
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Short() if where == "sampler" else super()._get_train_sampler(train_dataset)

        _get_eval_sampler = _get_train_sampler

    data: Any = Reader(18) if where == "dataset" else make_rows(NUM)
    collator = Collator(3) if where == "collator" else default_collate
    arguments = make_arguments(folder, num_train_epochs=1, **options)
    return Own(Net(), arguments, train_dataset=data, eval_dataset=data, data_collator=collator)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("where", ["dataset", "collator", "sampler"])
@pytest.mark.parametrize("call", ["train", "evaluate", "predict"])
def test_pass_that_ends_early_raises(tmp_path: Path, where: str, call: str, num_workers: int) -> None:
    trainer = make(tmp_path, where, dataloader_num_workers=num_workers, gradient_accumulation_steps=2)
    with pytest.raises(TaskError, match=r"ended after \d of 10 batches"):
        getattr(trainer, call)(*([trainer.eval_dataset] if call == "predict" else []))


def test_pass_of_an_engine_that_ends_early_raises() -> None:
    engine = Engine()
    loader: Any = DataLoader(Reader(18), batch_size=4)
    for training in (True, False):
        loader.dataset.source = iter(range(18))
        with pytest.raises(TaskError, match="ended after 4 of 10 batches"):
            list(engine.shard(loader, training=training))


@pytest.mark.parametrize(("num", "gave"), [(12, "ended after 3 batches"), (24, "goes on after 4 batches")])
def test_stream_of_another_length_than_it_states_warns(tmp_path: Path, num: int, gave: str) -> None:
    arguments = make_arguments(tmp_path, max_steps=8)
    with pytest.warns(UserWarning, match=f"Stream {gave}"):
        Trainer(Net(), arguments, train_dataset=Stream(num, 16)).train()


class Budget(Sampler[list[int]]):
    """Batches up to a number of tokens: as many in each pass as `numbers` says."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.numbers[self.epoch]

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        return (torch.randint(NUM, (3,), generator=generator).tolist() for _ in range(len(self)))


@pytest.mark.parametrize(("numbers", "steps"), [((5, 5, 4), 14), ((3, 5, 7), 9)])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:A pass had 3 batches when the run began")
def test_pass_may_have_any_length(tmp_path: Path, numbers: tuple[int, ...], steps: int, num_workers: int) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(make_rows(NUM), batch_sampler=Budget(numbers), num_workers=num_workers)

    weights = []
    for resume in (None, *range(1, steps, 1 + 3 * num_workers), steps):
        torch.manual_seed(0)
        trainer = Own(Net(), make_arguments(tmp_path, num_train_epochs=3, save_strategy="steps", save_steps=1))
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / f"checkpoint-{resume}"))
        assert (trainer.state.global_step, trainer.state.epoch) == (steps, 3.0 if steps == 14 else 2 + 1 / 7)
        weights.append(trainer.model.layers[0].weight)
    assert all(torch.equal(weight, weights[0]) for weight in weights)


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_collator_of_a_stream_that_stops_raises(tmp_path: Path, call: str) -> None:
    data, arguments = Stream(16, 16), make_arguments(tmp_path)
    with pytest.raises(TaskError, match="collator raised StopIteration"):
        getattr(Trainer(Net(), arguments, Collator(3), data, data), call)()


def test_override_may_join_batches(tmp_path: Path) -> None:
    class Joined(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
            joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]} if batches else None
            return [joined] if joined else [], num_items

    arguments = make_arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    trainer = Joined(Net(), arguments, train_dataset=make_rows(NUM))
    trainer.train()
    assert trainer.state.global_step == 5
