"""What scripts, callbacks and subclasses read from a Trainer, and set."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, at, make_arguments, make_rows, make_trainer
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hftrain import ConfigError, Trainer, TrainingArguments
from hftrain.strategies.base import Strategy
from hftrain.strategies.single import SingleDeviceStrategy


def make(folder: Path, model: Any = None, kind: Any = Trainer, **options: Any) -> Any:
    return make_trainer(folder, model, kind=kind, eval_dataset=make_rows(5), **options)


def test_documented_attributes_are_there(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    for name in (
        "args", "state", "control", "callback_handler", "optimizer", "lr_scheduler", "train_dataset", "eval_dataset",
        "data_collator", "processing_class", "label_names", "compute_metrics", "label_smoother", "model",
        "model_wrapped", "model_accepts_loss_kwargs", "is_in_train", "is_model_parallel", "place_model_on_device",
        "is_fsdp_enabled", "is_deepspeed_enabled", "is_tp_enabled", "can_return_loss", "model_init",
    ):  # fmt: skip
        assert hasattr(trainer, name), name
    assert not any((trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled, trainer.is_tp_enabled))
    assert (trainer.is_in_train, trainer.is_model_parallel, trainer.place_model_on_device) == (False, False, True)
    assert trainer.label_names == ["labels"]


def test_is_in_train_lasts_through_the_evaluations_of_a_run(tmp_path: Path) -> None:
    seen: list[Any] = []
    look = at("on_evaluate", lambda *args, **kwargs: seen.append(trainer.is_in_train))
    trainer = make(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer.add_callback(look)
    trainer.train()
    trainer.evaluate()
    assert seen == [True, False]


class Spread(Net):
    """A stand-in for a model that was loaded with a device map; this machine may have no accelerator."""

    hf_device_map = {"layers.0": 0, "layers.1": 1, "layers.4": "cpu"}  # noqa: RUF012


PARALLELIZED = type("Parallelized", (Net,), {"is_parallelizable": True, "model_parallel": True})


@pytest.mark.parametrize("model", [Spread, PARALLELIZED])
def test_spread_model_is_left_where_it_is(tmp_path: Path, model: type[Net]) -> None:
    trainer = make(tmp_path, model(), max_steps=1)
    assert trainer.is_model_parallel
    assert not trainer.place_model_on_device
    assert not trainer.strategy.place_model
    trainer.train()


def leaving_it(base: Any) -> Any:
    return type("LeavesIt", (base,), {"place_model_on_device": property(lambda _: False)})


def test_placing_is_refused_by_the_arguments_or_by_the_trainer(tmp_path: Path) -> None:
    arguments = leaving_it(TrainingArguments)(str(tmp_path), use_cpu=True, report_to="none", save_strategy="no")
    by_arguments = Trainer(Net(), arguments)
    assert not by_arguments.place_model_on_device
    assert not by_arguments.strategy.place_model
    assert not make(tmp_path, kind=leaving_it(Trainer)).strategy.place_model
    given = SingleDeviceStrategy(use_cpu=True, place_model=False)
    assert not Trainer(Net(), make_arguments(tmp_path), strategy=given).place_model_on_device


class NamesLabels(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label_names = ["target"]


class Targeted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Any, target: Any = None) -> Any:
        return self.net(x, target)


def test_label_names_set_by_a_subclass_are_heeded(tmp_path: Path) -> None:
    rows = [{"x": row["x"], "target": row["labels"]} for row in make_rows(6)]
    found = NamesLabels(Targeted(), make_arguments(tmp_path)).predict(rows)
    assert found.label_ids.tolist() == [int(row["target"]) for row in rows]


# -- models wrapped by the user ------------------------------------------------------------------------------------


def test_models_wrapped_by_the_user_are_unwrapped_for_model_and_trained_through_the_wrapper(tmp_path: Path) -> None:
    for wrap in (DataParallel, lambda model: torch.compile(model, backend="eager")):
        net = Net()
        wrapped = wrap(net)
        trainer = make(tmp_path, wrapped, max_steps=2)
        assert trainer.model is net
        assert trainer.model_wrapped is wrapped
        trainer.train()
        assert trainer.model is net
        assert trainer.model_wrapped is wrapped
        trainer.save_model()
        assert not any("_orig_mod" in name or "module." in name for name in trainer.model.state_dict())


def test_model_in_ddp_of_the_users_own_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own in, and leaves it there
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(Net())
        trainer = Trainer(wrapped, make_arguments(tmp_path, max_steps=2), train_dataset=make_rows(), strategy="ddp")
        assert trainer.model is wrapped.module
        trainer.train()
        assert trainer.model_wrapped is wrapped
    finally:
        torch.distributed.destroy_process_group()


def test_wrapped_task_is_recognised_as_one(tmp_path: Path) -> None:
    task = Task()
    trainer = make(tmp_path, DataParallel(task), max_steps=1)
    assert trainer.task is task
    trainer.train()


# -- methods that tell facts, or refuse ------------------------------------------------------------------------------


def test_tensor_parallel_size_is_the_models(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer.get_tp_size() == 1
    trainer.model.tp_size = 2  # type: ignore[assignment]
    assert trainer.get_tp_size() == 2
    assert trainer.is_tp_enabled
    with pytest.raises(ConfigError, match="split over 2 processes"):
        trainer.train()


def test_total_batch_counts_processes_with_the_same_samples_once(tmp_path: Path) -> None:
    class Parted(SingleDeviceStrategy):
        data: Any = SimpleNamespace(world_size=2)

    trainer = make(tmp_path, gradient_accumulation_steps=2)
    assert trainer.get_total_train_batch_size(trainer.args) == 8
    trainer.strategy = Parted(use_cpu=True)
    trainer.strategy.world_size = 4
    assert trainer.get_total_train_batch_size(trainer.args) == 16


def test_arguments_reach_a_deepspeed_strategy(tmp_path: Path) -> None:
    """A stand-in for the strategy: only that it is called counts."""

    class Engine(SingleDeviceStrategy):
        name = "deepspeed"
        told: Any = None

        def propagate_args(self, args: Any, *, auto_find_batch_size: bool) -> None:
            self.told = (args, auto_find_batch_size)

    strategy = Engine(use_cpu=True)
    trainer = Trainer(Net(), make_arguments(tmp_path), strategy=strategy)
    trainer.propagate_args_to_deepspeed(auto_find_batch_size=True)
    assert strategy.told == (trainer.args, True)


def test_use_cpu_contradicts_a_strategy_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="strategy=Strategy"):
        Trainer(Net(), make_arguments(tmp_path), strategy=Strategy(torch.device("cuda")))
