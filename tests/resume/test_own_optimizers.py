"""Optimizers and schedules that user code keeps for itself are saved and resumed with the run's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows, train

from hftrain import CheckpointError, Trainer, TrainerCallback
from hftrain.storage.tensors import load_containers


def make_critic(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return a second optimizer and schedule for the last layer."""
    optimizer = torch.optim.Adam(model.layers[4].parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


class Adversarial(Trainer):
    """Steps a second optimizer in its training_step."""

    def critic(self) -> tuple[torch.optim.Optimizer, Any]:
        raise NotImplementedError

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.Adam(self.model.layers[:2].parameters(), lr=0.02)
        return self.optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        optimizer, schedule = self.critic()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss


class Plain(Adversarial):
    """Has the same first optimizer, and no second one."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.model.layers[4].requires_grad_(False)
        return super().create_optimizer(model)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return Trainer.training_step(self, model, inputs, num_items_in_batch)


class Early(Adversarial):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic_optimizer, self.critic_schedule = make_critic(self.model)

    def critic(self) -> Any:
        return self.critic_optimizer, self.critic_schedule


class Lazy(Adversarial):
    parts: dict[str, Any] | None = None

    def critic(self) -> Any:
        if self.parts is None:
            self.parts = dict(zip(("optimizer", "schedule"), make_critic(self.model), strict=True))
        return self.parts["optimizer"], self.parts["schedule"]


class InList(Adversarial):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.others = list(make_critic(self.model))
        return super().create_optimizer(model)

    def critic(self) -> Any:
        return self.others


class OnTheTask(Adversarial):
    def critic(self) -> Any:
        if not hasattr(self.task, "critic"):
            self.task.critic = make_critic(self.model)
        return self.task.critic


class Critic:
    """A helper that is not a module, and knows the Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.parts = {"both": make_critic(trainer.model)}


class InAnObject(Adversarial):
    helper: Critic | None = None

    def critic(self) -> Any:
        if self.helper is None:
            self.helper = Critic(self)
        return self.helper.parts["both"]


class InTheModel(Adversarial):
    def critic(self) -> Any:
        layer = self.model.layers[4]
        if not hasattr(layer, "critic"):
            layer.critic = make_critic(self.model)
        return layer.critic


class Both:
    """Two optimizers as one."""

    def __init__(self, model: Any) -> None:
        self.by_parameter = {p: torch.optim.Adam([p], lr=0.05) for p in model.layers[4].parameters()}

    def step(self) -> None:
        for optimizer in self.by_parameter.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.by_parameter.values():
            optimizer.zero_grad()


class ByParameter(Adversarial):
    def critic(self) -> Any:
        if not hasattr(self, "both"):
            self.both = Both(self.model)
            self.schedule = torch.optim.lr_scheduler.StepLR(next(iter(self.both.by_parameter.values())), 2)
        return self.both, self.schedule


class Keeps(TrainerCallback):
    """Keeps a second optimizer itself, and makes it when the training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer, self.schedule = make_critic(kwargs["model"])


class InACallback(Adversarial):
    def critic(self) -> Any:
        keeper = next(each for each in self.callback_handler.callbacks if isinstance(each, Keeps))
        return keeper.optimizer, keeper.schedule


def make(kind: type[Trainer], folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(3)
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0, **options}
    return kind(Net(), make_arguments(folder, **options), train_dataset=make_rows(), callbacks=[Keeps])


def outcome(trainer: Trainer) -> list[Any]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [losses, *(parameter.tolist() for parameter in trainer.model.parameters())]


@pytest.mark.parametrize("kind", [Early, Lazy, InList, OnTheTask, InACallback, InAnObject, InTheModel, ByParameter])
def test_run_with_a_second_optimizer_resumes_to_the_last_bit(tmp_path: Path, kind: type[Trainer]) -> None:
    whole = make(kind, tmp_path)
    whole.train()
    resumed = make(kind, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert outcome(resumed) == outcome(whole)
    assert (tmp_path / "checkpoint-6" / "own_optimizers.pt").exists()


def test_attributes_of_the_trainer_keep_their_names_where_a_helper_knows_it(tmp_path: Path) -> None:
    class Knows(Early):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.helper = type("Helper", (), {})()
            self.helper.trainer = self
            super().__init__(*args, **kwargs)

    trainer = make(Knows, tmp_path, max_steps=3)
    trainer.train()
    names = load_containers(tmp_path / "checkpoint-3" / "own_optimizers.pt").keys()
    assert {"trainer.critic_optimizer", "trainer.critic_schedule"} < names


def test_checkpoint_of_a_run_without_any_has_no_such_file(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    assert not (tmp_path / "checkpoint-2" / "own_optimizers.pt").exists()


def test_alias_of_the_runs_own_optimizer_is_not_saved_twice(tmp_path: Path) -> None:
    class Alias(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.mine = super().create_optimizer()
            return self.mine

    arguments = make_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    Alias(Net(), arguments, train_dataset=make_rows()).train()
    assert not (tmp_path / "checkpoint-2" / "own_optimizers.pt").exists()


def test_state_that_the_resumed_run_never_asks_for_is_told_of_and_kept(tmp_path: Path) -> None:
    make(Early, tmp_path).train()
    resumed = make(Plain, tmp_path, save_steps=2)
    with pytest.warns(UserWarning, match=r"trainer.critic_optimizer, trainer.critic_schedule, which it never created"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (tmp_path / "checkpoint-4" / "own_optimizers.pt").exists()


def test_optimizer_without_a_saved_state_is_told_of(tmp_path: Path) -> None:
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    Plain(Net(), make_arguments(tmp_path, **arguments), train_dataset=make_rows()).train()
    with pytest.warns(UserWarning, match=r"has no state for trainer.critic_optimizer"):
        Early(Net(), make_arguments(tmp_path, **arguments), train_dataset=make_rows()).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-3")
        )


def test_weights_that_only_the_second_optimizer_knows_are_told_of(tmp_path: Path) -> None:
    class Outside(Task):
        def training_step(self, batch: Any) -> Any:
            if not hasattr(self, "optimizer"):
                self.critic = [torch.nn.Linear(2, 2)]  # hidden from the task
                self.optimizer = torch.optim.SGD(self.critic[0].parameters(), lr=0.1)
            return super().training_step(batch)

    arguments = make_arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    with pytest.warns(UserWarning, match=r"state of task.optimizer but not all the weights"):
        Trainer(Outside(), arguments, train_dataset=make_rows()).train()


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    make(Early, tmp_path).train()

    class Other(Early):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.critic_optimizer = torch.optim.Adam(self.model.layers[0].parameters(), lr=0.1, eps=1e-3)
            self.critic_optimizer.add_param_group({"params": list(self.model.layers[4].parameters())})

    with pytest.raises(CheckpointError, match=r"Cannot restore .*own_optimizers.pt"):
        make(Other, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_optimizers_are_restored_before_the_schedules_that_write_into_them(tmp_path: Path) -> None:
    class Writes(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.optimizer.param_groups[0]["lr"] = 0.125

    class First(Adversarial):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            optimizer, _ = make_critic(self.model)
            self.critic_schedule, self.rates = Writes(optimizer, 100), []
            self.critic_optimizer = optimizer

        def critic(self) -> Any:
            self.rates.append(self.critic_optimizer.param_groups[0]["lr"])
            return self.critic_optimizer, self.critic_schedule

    make(First, tmp_path, max_steps=3).train()
    resumed: Any = make(First, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.rates == [0.125]
