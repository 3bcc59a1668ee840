"""`trainer.accelerator` is a real one, made late, and says what the strategy says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, StrategyError, Trainer
from hftrain.strategies.single import SingleDeviceStrategy
from hftrain.trainer.acceleration import has_engine


def make(folder: Path, **options: Any) -> Trainer:
    return Trainer(Net(), make_arguments(folder, **options), train_dataset=make_rows())


def test_accelerator_is_made_on_first_use_and_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert not AcceleratorState._shared_state
    assert not PartialState._shared_state
    trainer.train()
    assert not AcceleratorState._shared_state
    first = trainer.accelerator
    assert isinstance(first, Accelerator)
    assert trainer.accelerator is first
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator is not first


def test_accelerator_says_what_strategy_and_arguments_say(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        gradient_accumulation_steps=3,
        bf16=True,
        accelerator_config={"even_batches": False, "split_batches": True},
    )
    found = trainer.accelerator
    assert (found.device, found.num_processes, found.process_index) == (torch.device("cpu"), 1, 0)
    assert (found.mixed_precision, found.gradient_accumulation_steps) == ("bf16", 3)
    assert (found.even_batches, bool(found.split_batches)) == (False, True)
    assert found.is_main_process
    assert found.is_local_main_process
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_accelerator_does_what_scripts_use_it_for(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    accelerator = trainer.accelerator
    assert accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    assert accelerator.gather(torch.ones(2)).tolist() == [1, 1]
    accelerator.wait_for_everyone()
    assert accelerator.get_state_dict(trainer.model_wrapped).keys() == trainer.model.state_dict().keys()
    with accelerator.autocast(), accelerator.main_process_first(), accelerator.accumulate(trainer.model):
        pass


def test_accelerators_of_two_trainers_keep_apart(tmp_path: Path) -> None:
    one = make(tmp_path, bf16=True, gradient_accumulation_steps=2).accelerator
    two = make(tmp_path).accelerator
    assert (one.mixed_precision, one.gradient_accumulation_steps) == ("bf16", 2)
    assert (two.mixed_precision, two.gradient_accumulation_steps) == ("no", 1)
    three = make(tmp_path, bf16=True).accelerator
    assert (two.mixed_precision, three.mixed_precision) == ("no", "bf16")


def test_accelerator_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    own = Accelerator(cpu=True)
    assert make(tmp_path).accelerator is not own
    assert own.mixed_precision == "no"
    assert own.is_main_process


def test_accelerate_that_means_other_processes_is_named(tmp_path: Path) -> None:
    PartialState(cpu=True)
    PartialState._shared_state["num_processes"] = 2
    with pytest.raises(StrategyError, match="accelerate says"):
        _ = make(tmp_path).accelerator


def test_accelerate_set_up_for_another_device_is_set_up_anew(tmp_path: Path) -> None:
    PartialState(cpu=True)
    # A stand-in for an accelerator, which this machine may not have.
    PartialState._shared_state["device"] = torch.device("meta")
    assert make(tmp_path).accelerator.device == torch.device("cpu")


def test_accelerator_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accelerator was assigned"):
        make(tmp_path).accelerator = Accelerator(cpu=True)


def test_fp16_on_the_cpu_is_told_as_none(tmp_path: Path) -> None:
    """Accelerate refuses fp16 there, torch does not."""
    trainer = Trainer(Net(), make_arguments(tmp_path), precision="fp16")
    assert trainer.accelerator.mixed_precision == "no"


def test_gather_function_is_accelerates_and_takes_both_of_its_forms(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer.gather_function == trainer.accelerator.gather_for_metrics
    trainer.gather_function = trainer.accelerator.gather
    assert trainer.predict(make_rows(5)).predictions.shape == (5, 3)
    with pytest.raises(ConfigError, match="gather_function"):
        trainer.gather_function = lambda tensor: tensor


def test_override_makes_the_accelerator(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.even_batches = False

    assert not Own(Net(), make_arguments(tmp_path)).accelerator.even_batches


def test_options_of_a_strategy_reach_the_accelerator(tmp_path: Path) -> None:
    class Told(SingleDeviceStrategy):
        name = "told"

        def accelerator_options(self) -> dict[str, Any]:
            return {**super().accelerator_options(), "step_scheduler_with_optimizer": False}

    trainer = Trainer(Net(), make_arguments(tmp_path), strategy=Told(use_cpu=True))
    assert trainer.accelerator.step_scheduler_with_optimizer is False


def test_engine_is_told_by_the_names_of_a_strategy_and_its_bases() -> None:
    class Sharded(SingleDeviceStrategy):
        name = "fsdp_like"

    class Mine(Sharded):
        name = "mine"

    strategy = Mine(use_cpu=True)
    assert has_engine(strategy, "fsdp")
    assert not has_engine(strategy, "deepspeed")
