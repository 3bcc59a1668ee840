"""`trainer.accelerator` is a real one, made late, and says what the strategy says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from support.tiny import Net, make_arguments, make_rows, make_trainer

from hftrain import ConfigError, StrategyError, Trainer
from hftrain.strategies.single import SingleDeviceStrategy


def test_accelerator_is_made_on_first_use_and_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
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
    trainer = make_trainer(
        tmp_path,
        gradient_accumulation_steps=3,
        bf16=True,
        accelerator_config={"even_batches": False, "split_batches": True},
    )
    found = trainer.accelerator
    assert (found.device, found.num_processes, found.process_index) == (torch.device("cpu"), 1, 0)
    assert (found.mixed_precision, found.gradient_accumulation_steps) == ("bf16", 1)
    assert (found.even_batches, bool(found.split_batches)) == (False, True)
    assert found.is_main_process
    assert found.is_local_main_process
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_accelerator_does_what_scripts_use_it_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    accelerator = trainer.accelerator
    assert accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    assert accelerator.gather(torch.ones(2)).tolist() == [1, 1]
    accelerator.wait_for_everyone()
    assert accelerator.get_state_dict(trainer.model_wrapped).keys() == trainer.model.state_dict().keys()
    with accelerator.autocast(), accelerator.main_process_first(), accelerator.accumulate(trainer.model):
        pass


def test_accelerator_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    own = Accelerator(cpu=True)
    assert make_trainer(tmp_path).accelerator is not own
    assert own.mixed_precision == "no"
    assert own.is_main_process


def test_accelerate_that_means_other_processes_is_named(tmp_path: Path) -> None:
    PartialState(cpu=True)
    PartialState._shared_state["num_processes"] = 2
    with pytest.raises(StrategyError, match="accelerate says"):
        _ = make_trainer(tmp_path).accelerator


def test_accelerate_set_up_for_another_device_is_set_up_anew(tmp_path: Path) -> None:
    PartialState(cpu=True)
    # A stand-in for an accelerator, which this machine may not have.
    PartialState._shared_state["device"] = torch.device("meta")
    assert make_trainer(tmp_path).accelerator.device == torch.device("cpu")


def test_assigned_accelerator_takes_the_place_of_the_trainers_own(tmp_path: Path) -> None:
    own = Accelerator(cpu=True)
    trainer = make_trainer(tmp_path)
    trainer.accelerator = own
    assert trainer.accelerator is own
    trainer.train()
    trainer.accelerator = None
    assert trainer.accelerator is not own


def test_assigned_accelerator_must_fit_the_strategy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match="A str is not an accelerate"):
        trainer.accelerator = "mine"
    own = Accelerator(cpu=True)
    own.state.fsdp_plugin = object()
    with pytest.raises(ConfigError, match="its own engine"):
        trainer.accelerator = own
    own.state.__dict__["num_processes"] = 2
    del own.state.__dict__["fsdp_plugin"]
    with pytest.raises(StrategyError, match="accelerate says"):
        trainer.accelerator = own


def test_assigned_accelerator_of_another_precision_is_told_of(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, bf16=True)
    with pytest.warns(UserWarning, match="still runs with precision='bf16'"):
        trainer.accelerator = Accelerator(cpu=True)


def by_hand(folder: Path, kind: type[Trainer], *, precision: str = "fp32", **options: Any) -> Trainer:
    """Train 3 updates of 4 micro-batches, as many samples in each."""
    torch.manual_seed(5)
    arguments = make_arguments(folder, max_steps=3, gradient_accumulation_steps=4, **options)
    trainer = kind(Net(), arguments, train_dataset=make_rows(48), precision=precision)
    trainer.train()
    return trainer


class ByHand(Trainer):
    """The documented training_step, written out."""

    keywords: ClassVar[dict[str, Any]] = {}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss, **self.keywords)
        return loss.detach()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_backward_of_the_accelerator_is_the_runs(tmp_path: Path, precision: str) -> None:
    found, expected = (by_hand(tmp_path, kind, precision=precision) for kind in (ByHand, Trainer))
    for mine, other in zip(found.state.log_history[:3], expected.state.log_history[:3], strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_backward_of_the_accelerator_takes_torchs_keywords_and_the_engines(tmp_path: Path) -> None:
    class Twice(ByHand):
        keywords: ClassVar[dict[str, Any]] = {"retain_graph": True, "learning_rate": 0.1, "scale_wrt_gas": False}

    found, expected = by_hand(tmp_path, Twice), by_hand(tmp_path, Trainer)
    assert found.state.log_history[2]["grad_norm"] == pytest.approx(expected.state.log_history[2]["grad_norm"])


def test_backward_of_an_accelerator_that_accumulates_divides_as_it_says(tmp_path: Path) -> None:
    class Undivided(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach() / 4

    class Assigned(Undivided):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)

    found, expected = by_hand(tmp_path, Assigned), by_hand(tmp_path, Trainer)
    assert found.state.log_history[2] == pytest.approx(expected.state.log_history[2], rel=1e-5)


def test_backward_outside_of_a_run_is_accelerates_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    weight = torch.ones(2, requires_grad=True)
    trainer.accelerator.backward(weight.sum())
    assert weight.grad is not None


class Watching(Trainer):
    """Notes where the accelerator says that gradients are synchronised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[bool, int]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        # Optimizers that accelerate has prepared ask the shared state.
        assert self.accelerator.sync_gradients == GradientState().sync_gradients
        self.seen.append((self.accelerator.sync_gradients, self.current_gradient_accumulation_steps))
        return super().training_step(model, inputs, num_items_in_batch)


def test_sync_gradients_tells_which_micro_step_is_the_last(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=2)
    trainer = Watching(Net(), arguments, train_dataset=make_rows(20))
    trainer.train()
    # 5 batches: the last update has one micro-batch.
    assert trainer.seen == [(False, 2), (True, 2)] * 2 + [(True, 1)]
    assert GradientState().sync_gradients


def test_sync_gradients_is_true_again_after_an_error(tmp_path: Path) -> None:
    class Breaks(Watching):
        def training_step(self, *args: Any) -> Any:
            assert not self.accelerator.sync_gradients
            raise OSError("gone")

    trainer = Breaks(Net(), make_arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=make_rows(20))
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    assert trainer.accelerator.sync_gradients


def test_fp16_on_the_cpu_is_told_as_none(tmp_path: Path) -> None:
    """Accelerate refuses fp16 there, torch does not."""
    trainer = Trainer(Net(), make_arguments(tmp_path), precision="fp16")
    assert trainer.accelerator.mixed_precision == "no"


def test_gather_function_is_accelerates_and_takes_both_of_its_forms(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.gather_function == trainer.accelerator.gather_for_metrics
    trainer.gather_function = trainer.accelerator.gather
    assert trainer.predict(make_rows(5)).predictions.shape == (5, 3)
    with pytest.raises(ConfigError, match="gather_function"):
        trainer.gather_function = lambda tensor: tensor


def test_options_of_a_strategy_reach_the_accelerator(tmp_path: Path) -> None:
    class Told(SingleDeviceStrategy):
        name = "told"

        def accelerator_options(self) -> dict[str, Any]:
            return {**super().accelerator_options(), "step_scheduler_with_optimizer": False}

    trainer = Trainer(Net(), make_arguments(tmp_path), strategy=Told(use_cpu=True))
    assert trainer.accelerator.step_scheduler_with_optimizer is False
