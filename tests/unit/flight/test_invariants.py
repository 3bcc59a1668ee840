"""What a flight log checks while it is written: each with a run that breaks it, and runs that are told nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows
from unit.flight.test_flight import SIZE, make

from hftrain import FlightLog, HFTrainError, Mixture, Trainer, set_seed
from hftrain.extras.flight.invariants import _find_equal_readers

LOG = {"flush_every": 3}


class Unused(Net):
    """A network with a part that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


def told(folder: Path, trainer: Any = None, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (make(folder, flight_log=FlightLog(**LOG), **options) if trainer is None else trainer).train()
    return [str(each.message) for each in caught]


def trainer_of(folder: Path, model: Any, *callbacks: Any, optimizer: Any = None, **options: Any) -> Trainer:
    set_seed(1)
    args = make_arguments(folder, **{"max_steps": 12, "per_device_train_batch_size": SIZE, **options})
    parts: dict[str, Any] = {} if optimizer is None else {"optimizers": (optimizer, None)}
    log = FlightLog(**LOG)
    return Trainer(model, args, train_dataset=make_rows(60), callbacks=list(callbacks), flight_log=log, **parts)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"gradient_accumulation_steps": 3}, {"dataloader_num_workers": 2}, {"bf16": True}, {"max_grad_norm": 0.01},
        {"warmup_steps": 4, "learning_rate": 0.1},
        {"exclude_samples": [0, 1, 2, 3], "train_sampling_strategy": "sequential"},
        {"dataloader_drop_last": True}, {"optim": "sgd"},
        pytest.param({"optim": "adafactor"}, marks=pytest.mark.interop),
    ],
    ids=str,
)  # fmt: skip
def test_sound_runs_are_told_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    assert told(tmp_path, **options) == []


def test_parameters_without_a_gradient_are_named(tmp_path: Path) -> None:
    (one,) = told(tmp_path, trainer_of(tmp_path, Unused()))
    assert one.startswith("Trained parameters had no gradient in the steps 2, 5, 8: spare.weight, spare.bias. ")
    frozen = Unused()
    frozen.spare.requires_grad_(False)
    assert told(tmp_path, trainer_of(tmp_path, frozen)) == []


def test_parameters_that_the_optimizer_does_not_have_are_named(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "layers.4.weight"], lr=0.1)
    (one,) = [each for each in told(tmp_path, trainer_of(tmp_path, model, optimizer=optimizer)) if "change" in each]
    assert one.startswith("Trained parameters did not change between the steps 2, 5, 8: layers.4.weight. ")


def test_updates_that_a_coarse_dtype_loses_are_named(tmp_path: Path) -> None:
    model = Net()
    with torch.no_grad():
        model.layers[4].weight.fill_(1.0)  # its neighbours in bf16 are 1 / 128 away
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD([{"params": [*model.parameters()], "lr": 1e-4}])
    rows = [{"x": row["x"].bfloat16(), "labels": row["labels"]} for row in make_rows(60)]
    trainer = trainer_of(tmp_path, model, optimizer=optimizer)
    trainer.train_dataset = rows
    found = told(tmp_path, trainer)
    assert any("did not change" in each and "layers.4.weight" in each for each in found)


def test_a_broken_run_is_stopped_if_asked(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Unused())
    log = next(each for each in trainer.callback_handler.callbacks if isinstance(each, FlightLog))
    log.on_broken = "stop"
    with pytest.raises(HFTrainError, match="spare"):
        trainer.train()
    assert trainer.state.global_step == 9


def test_mixtures_and_streams_may_repeat(tmp_path: Path) -> None:
    assert told(tmp_path, rows=Mixture({"a": (make_rows(10), 5), "b": make_rows(40)}, mode="max_size")) == []


def test_processes_that_read_the_same_samples_are_named() -> None:
    (found,) = _find_equal_readers({1: [[1, 2], [3, 4], [1, 2]], 2: [[5, 6], [7, 8], [5, 6]]})
    assert found[1].startswith("The processes 0 and 2 read the same samples in the steps 1 to 2")
    assert not list(_find_equal_readers({1: [[1, 2], [3, 4]], 2: [[5, 6], [1, 2]]}))
    assert not list(_find_equal_readers({1: [[1, 1], [1, 1]], 2: [[1], [1]]}))
