"""`Trainer.tune`: answers that make sense, and a Trainer that is as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Stream, make_rows, make_trainer

from hftrain import EMA, ConfigError, Mixture, set_seed


def make(folder: Path, *callbacks: Any, **options: Any) -> Any:
    set_seed(0)
    rows = [{"x": row["x"], "labels": row["x"][:3].argmax()} for row in make_rows(256)]
    settings: Any = {"max_steps": 4, "per_device_train_batch_size": 16}
    return make_trainer(folder, Net(0.1), *callbacks, train_dataset=rows, **settings | options)


def test_rate_trial_finds_where_the_loss_falls_and_leaves_no_trace(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain")
    plain.train()
    tuned = make(tmp_path / "tuned", EMA(0.9))
    before, arguments = copy.deepcopy(tuned.model.state_dict()), tuned.args.to_dict()
    numbers = torch.get_rng_state()
    found = tuned.tune.lr(num_steps=60, max_lr=100.0)
    assert found.suggestion is not None
    assert 1e-4 < found.suggestion < 1.0
    assert len(found.rates) == len(found.losses) <= 60
    assert len(make(tmp_path / "far").tune.lr(num_steps=60, max_lr=1e6).losses) < 60
    assert found.losses[0] > min(found.losses)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert tuned.args.to_dict() == arguments
    assert all(torch.equal(value, before[name]) for name, value in tuned.model.state_dict().items())
    assert not (tmp_path / "tuned").exists()
    assert tuned.state.global_step == 0
    again = make(tmp_path / "tuned")
    again.tune.lr(num_steps=5)
    again.train()
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), plain.model.parameters(), strict=True))
    found.plot(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 1000


def test_a_loss_that_never_falls_has_no_suggestion(tmp_path: Path) -> None:
    class Flat(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            loss, *others = super().forward(x, labels)
            return (loss * 0.0 + 1.0, *others)

    trainer = make_trainer(tmp_path, Flat(), train_dataset=make_rows(64))
    assert trainer.tune.lr(num_steps=6).suggestion is None


@pytest.mark.parametrize("wrong", [{"min_lr": 0.0}, {"min_lr": 1.0, "max_lr": 0.1}, {"num_steps": 2}])
def test_rates_that_make_no_range_are_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="rates"):
        make(tmp_path).tune.lr(**wrong)


class Full(Net):
    """Runs out of memory with more than 16 samples."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        if len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(x, labels)


def test_largest_batch_size_that_works_is_found(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Full(), train_dataset=make_rows(64))
    before = copy.deepcopy(trainer.model.state_dict())
    assert trainer.tune.batch_size() == 16
    assert trainer.args.per_device_train_batch_size == 4
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert make_trainer(tmp_path, Net(), train_dataset=make_rows(64)).tune.batch_size() == 64
    streams = Mixture({"a": Stream(make_rows()), "b": Stream(make_rows())})
    assert make_trainer(tmp_path, Net(), train_dataset=streams).tune.batch_size(most=8) == 8
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(tmp_path, Full(), train_dataset=make_rows(64), per_device_train_batch_size=32).tune.batch_size()


def test_other_errors_of_a_trial_are_raised(tmp_path: Path) -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            raise RuntimeError("broken")

    trainer = make_trainer(tmp_path, Broken(), train_dataset=make_rows(64))
    with pytest.raises(RuntimeError, match="broken"):
        trainer.tune.batch_size()
    assert not tmp_path.exists() or not list(tmp_path.glob(".tuning*"))


def test_loader_workers_are_compared(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    rates = trainer.tune.loader((0, 1), num_batches=5)
    assert set(rates) == {0, 1}
    assert list(rates.values()) == sorted(rates.values(), reverse=True)
    assert trainer.args.dataloader_num_workers == 0
