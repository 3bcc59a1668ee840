"""A run that is stopped and resumed, once or twice, equals one that never was, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, assert_same, check_resumes, outcome
from support.tiny import Noisy, make_resumable, make_rows
from torch.utils.data import DataLoader, Sampler, default_collate

from hftrain import Trainer, TrainerCallback
from hftrain.data import feed


def make_trainer(folder: Path, data: Any, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    return make_resumable(folder, *callbacks, train_dataset=data, **{"logging_steps": 3, **options})


def check_resume(tmp_path: Path, data: Any, stops: tuple[int, ...], **options: Any) -> None:
    whole, resumed = check_resumes(
        lambda folder, *callbacks: make_trainer(folder, data, *callbacks, **options), tmp_path, stops
    )
    assert resumed.state.log_history[-1]["train_loss"] == whole.state.log_history[-1]["train_loss"]


class Scaling(Trainer):
    """Scales inputs by a number of the batch that is no tensor."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        scaled = {"x": inputs["x"] * inputs["scale"], "labels": inputs["labels"]}
        return super().compute_loss(model, scaled, *args, **options)


def test_batch_of_random_objects_is_collated_again_from_the_same_numbers(tmp_path: Path) -> None:
    def collate(rows: Any) -> Any:
        return {**default_collate(rows), "scale": random.random()}

    check_resume(
        tmp_path, make_rows(), (3,), kind=Scaling, data_collator=collate, max_steps=6, eval_dataset=None
    )  # fmt: skip


class Rounds(Trainer):
    """Reads several loaders, one after another, each of which draws its order when it begins."""

    def get_train_dataloader(self) -> Any:
        class Loaders:
            def __iter__(self) -> Any:
                for rows in (make_rows(9, seed=1), make_rows(9, seed=2), make_rows(9, seed=3)):
                    yield from DataLoader(Noisy(rows), batch_size=4, shuffle=True, collate_fn=default_collate)

            def __len__(self) -> int:
                return 9

        return Loaders()


def test_iterable_that_draws_in_the_middle_of_a_pass_goes_on_exactly(tmp_path: Path) -> None:
    check_resume(tmp_path, None, (2, 4, 7, 11), kind=Rounds, num_train_epochs=2)


class Lazily(Sampler[int]):
    """Shuffles each block of six indices when it is reached."""

    def __iter__(self) -> Any:
        for start in range(0, 22, 6):
            block = list(range(start, min(start + 6, 22)))
            random.shuffle(block)
            yield from (block[index] for index in torch.randperm(len(block)).tolist())

    def __len__(self) -> int:
        return 22


class DrawingLazily(Trainer):
    """Reads the data in an order that is drawn in the middle of a pass."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return Lazily()


class DrawingInALoader(Trainer):
    """Reads such an order with a loader of its own."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(
            self.train_dataset, batch_size=4, sampler=Lazily(), num_workers=self.args.dataloader_num_workers
        )


@pytest.mark.parametrize("kind", [DrawingLazily, DrawingInALoader])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_sampler_that_draws_in_the_middle_of_a_pass_goes_on_exactly(
    tmp_path: Path, kind: type[Trainer], num_workers: int
) -> None:
    options = {"kind": kind, "dataloader_num_workers": num_workers, "num_train_epochs": 2}
    check_resume(tmp_path, Noisy(make_rows()), (2, 7), **options)


def test_states_of_generators_are_copied_for_planned_saves_only(tmp_path: Path, monkeypatch: Any) -> None:
    copied: list[int] = []
    monkeypatch.setattr(feed, "rng_now", lambda devices: copied.append(trainer.state.global_step))
    monkeypatch.setattr(feed, "plain_rng", lambda state: state)
    trainer = make_trainer(tmp_path, make_rows(80), save_steps=5, max_steps=15)
    trainer.train()
    assert copied == [4, 9, 14]


@pytest.mark.parametrize("names", [("fp16", "bf16"), ("fp32", "fp16")], ids="-".join)
def test_precision_may_change_at_a_resume(
    tmp_path: Path, names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, make_rows(22), StopAt(4), precision=names[0]).train()
    resumed = make_trainer(tmp_path, make_rows(22), precision=names[1])
    assert resumed.train(resume_from_checkpoint=True).global_step == 12
    assert f"precision {names[0]} -> {names[1]}" in caplog.text
    assert "sample 16 of 22" in caplog.text
    assert resumed.lr_scheduler.last_epoch == 12 - resumed.precision.logs().get("skipped_steps", 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_in_another_precision_equals_an_undisturbed_run(tmp_path: Path, precision: str) -> None:
    check_resume(tmp_path, make_rows(22), (4,), precision=precision)


def test_order_drawn_from_the_global_generator_is_found_again_after_an_epochs_end(tmp_path: Path) -> None:
    # Saved at an epoch's end, resumed, saved within the next one, resumed.
    options: dict[str, Any] = {"accelerator_config": {"use_seedable_sampler": False}, "num_train_epochs": 3}
    check_resume(tmp_path, make_rows(22), (6, 8), **options)
    save = {**options, "save_strategy": "epoch"}
    whole = make_trainer(tmp_path / "epochs", make_rows(22), **save)
    whole.train()
    again = make_trainer(tmp_path / "epochs", make_rows(22), StopAt(8), **save)
    again.train(resume_from_checkpoint=str(tmp_path / "epochs" / "checkpoint-6"))
    last = make_trainer(tmp_path / "epochs", make_rows(22), **save)
    last.train(resume_from_checkpoint=str(tmp_path / "epochs" / "checkpoint-8"))
    assert_same(outcome(last), outcome(whole))
