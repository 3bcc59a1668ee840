"""Optimizers and schedules that user code keeps for itself are saved and resumed with the run's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import assert_same, outcome
from support.tiny import Net, Task, make_arguments, make_rows, train
from torch.optim.optimizer import _global_optimizer_post_hooks

from hftrain import CheckpointError, ConfigError, Trainer, TrainerCallback
from hftrain.loops.fit import FitLoop
from hftrain.storage.tensors import load_containers


def make_critic(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return a second optimizer and schedule for the last layer."""
    optimizer = torch.optim.Adam(model.layers[4].parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


class Adversarial(Trainer):
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
    """Has the same first optimizer, and no second one of its own."""

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

    def checkpoint_objects(self) -> dict[str, Any]:
        return {"critic_optimizer": self.critic_optimizer, "critic_schedule": self.critic_schedule}


class Lazy(Adversarial):
    parts: dict[str, Any] | None = None

    def critic(self) -> Any:
        if self.parts is None:
            self.parts = dict(zip(("optimizer", "schedule"), make_critic(self.model), strict=True))
        return self.parts["optimizer"], self.parts["schedule"]

    def checkpoint_objects(self) -> dict[str, Any]:
        return self.parts or {}


class OnTheTask(Adversarial):
    def critic(self) -> Any:
        if not hasattr(self.task, "critic"):
            self.task.critic = make_critic(self.model)
            self.task.checkpoint_objects = lambda: dict(zip("ab", self.task.critic, strict=True))
        return self.task.critic


class Keeps(TrainerCallback):
    """Keeps a second optimizer itself, and makes it when the training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer, self.schedule = make_critic(kwargs["model"])

    def checkpoint_objects(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "schedule": self.schedule}


class InACallback(Adversarial):
    def critic(self) -> Any:
        keeper = next(each for each in self.callback_handler.callbacks if isinstance(each, Keeps))
        return keeper.optimizer, keeper.schedule


def make(kind: type[Trainer], folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(3)
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0, **options}
    return kind(Net(), make_arguments(folder, **options), train_dataset=make_rows(), callbacks=[Keeps])


@pytest.mark.parametrize("kind", [Early, Lazy, OnTheTask, InACallback])
def test_run_with_a_second_optimizer_resumes_to_the_last_bit(tmp_path: Path, kind: type[Trainer]) -> None:
    whole = make(kind, tmp_path)
    whole.train()
    resumed = make(kind, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(outcome(resumed), outcome(whole))
    assert (tmp_path / "checkpoint-6" / "own_optimizers.pt").exists()


def test_objects_in_a_checkpoint_have_the_names_that_were_declared(tmp_path: Path) -> None:
    make(Early, tmp_path, max_steps=3).train()
    names = load_containers(tmp_path / "checkpoint-3" / "own_optimizers.pt").keys()
    assert names == {"trainer.critic_optimizer", "trainer.critic_schedule", "Keeps.optimizer", "Keeps.schedule"}


class Undeclared(Early):
    """Tells nobody of its optimizer."""

    def checkpoint_objects(self) -> dict[str, Any]:
        return {}


def test_optimizer_that_steps_and_is_not_declared_is_named_at_the_save(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=", and its schedule, from checkpoint_obj"):
        make(Undeclared, tmp_path, max_steps=3).train()


def test_optimizer_without_a_state_is_not_missed(tmp_path: Path) -> None:
    class Stateless(Undeclared):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            torch.optim.SGD(self.model.layers[4].parameters(), lr=0.1).step()
            return Trainer.training_step(self, *args, **kwargs)

    make(Stateless, tmp_path, max_steps=3).train()
    assert (tmp_path / "checkpoint-3").exists()


def test_optimizer_inside_the_runs_own_is_not_missed(tmp_path: Path) -> None:
    class Outer(torch.optim.Adam):
        """Has the state of another optimizer as its own."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.inner = torch.optim.Adam(self.param_groups)
            self.state = self.inner.state

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model = Net()
    optimizers = (Outer(model.parameters(), lr=0.1), None)
    train(tmp_path, model, max_steps=2, save_strategy="steps", save_steps=2, optimizers=optimizers)
    assert not (tmp_path / "checkpoint-2" / "own_optimizers.pt").exists()


def test_optimizer_that_a_loop_saves_is_not_missed(tmp_path: Path) -> None:
    class Alternate(FitLoop):
        def attach(self, parts: Any) -> None:
            super().attach(parts)
            self.optimizer, _ = make_critic(parts.model)

        def run_step(self, window: Any, num_items: Any) -> None:
            super().run_step(window, num_items)
            for parameter in self.parts.model.layers[4].parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()

        def state_dict(self) -> Any:
            return {"critic": self.optimizer.state_dict()}

        def load_state_dict(self, state: Any) -> None:
            self.optimizer.load_state_dict(state["critic"])

    train(tmp_path, None, loop=Alternate(), max_steps=2, save_strategy="steps", save_steps=2)
    assert (tmp_path / "checkpoint-2").exists()


def test_schedule_that_is_not_declared_with_its_optimizer_is_missed(tmp_path: Path) -> None:
    class Forgets(Early):
        def checkpoint_objects(self) -> dict[str, Any]:
            return {"critic": self.critic_optimizer}

    with pytest.warns(UserWarning, match=r"state of trainer.critic but not its learning rate schedule"):
        make(Forgets, tmp_path, max_steps=3).train()


@pytest.mark.parametrize(("value", "reason"), [(5, "A int has no state_dict"), (None, "A NoneType has no state_dict")])
def test_objects_that_have_no_state_are_refused_before_the_first_step(tmp_path: Path, value: Any, reason: str) -> None:
    class Wrong(Undeclared):
        def checkpoint_objects(self) -> dict[str, Any]:
            return {"number": value}

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise AssertionError("It trains.")

    with pytest.raises(ConfigError, match=reason):
        make(Wrong, tmp_path).train()


def test_modules_and_generators_that_are_declared_resume_to_the_last_bit(tmp_path: Path) -> None:
    class Draws(TrainerCallback):
        def __init__(self) -> None:
            self.generator, self.numbers = torch.Generator(), []
            self.average = torch.nn.Linear(2, 2)
            torch.nn.init.zeros_(self.average.weight)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.numbers.append(torch.rand((), generator=self.generator).item())
            self.average.weight.data.add_(1)

        def checkpoint_objects(self) -> dict[str, Any]:
            return {"average": self.average, "generator": self.generator}

    whole, resumed = Draws(), Draws()
    train(tmp_path, None, whole, max_steps=6, save_strategy="steps", save_steps=3)
    train(tmp_path, None, resumed, max_steps=6, save_strategy="no", resume=str(tmp_path / "checkpoint-3"))
    assert resumed.numbers == whole.numbers[3:]
    assert torch.equal(resumed.average.weight, torch.full((2, 2), 6.0))


def test_state_that_the_resumed_run_never_asks_for_is_told_of_and_kept(tmp_path: Path) -> None:
    make(Early, tmp_path).train()
    resumed = make(Plain, tmp_path, save_steps=2)
    with pytest.warns(UserWarning, match=r"trainer.critic_optimizer, trainer.critic_schedule, which it never created"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (tmp_path / "checkpoint-4" / "own_optimizers.pt").exists()


def test_optimizer_without_a_saved_state_is_told_of(tmp_path: Path) -> None:
    make(Plain, tmp_path).train()
    with pytest.warns(UserWarning, match=r"has no state for trainer.critic_optimizer"):
        make(Early, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_weights_that_only_the_second_optimizer_knows_are_told_of(tmp_path: Path) -> None:
    class Outside(Task):
        def __init__(self) -> None:
            super().__init__()
            self.critic = [torch.nn.Linear(2, 2)]  # hidden from the task
            self.optimizer = torch.optim.SGD(self.critic[0].parameters(), lr=0.1)

        def checkpoint_objects(self) -> dict[str, Any]:
            return {"optimizer": self.optimizer}

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

    with pytest.raises(CheckpointError, match=r"own_optimizers.pt"):
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

        def checkpoint_objects(self) -> dict[str, Any]:
            return {"a_schedule": self.critic_schedule, "optimizer": self.critic_optimizer}

    make(First, tmp_path, max_steps=3).train()
    resumed: Any = make(First, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.rates == [0.125]


def test_a_run_that_cannot_be_built_watches_no_optimizer(tmp_path: Path) -> None:
    class Unsaveable(Task):
        def __init__(self) -> None:
            super().__init__()
            self.tried = True

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.state_dict = lambda: {"state": object()}  # type: ignore[method-assign,assignment,return-value]
            return optimizer

    before = len(_global_optimizer_post_hooks)
    with pytest.raises(ConfigError):
        Trainer(Unsaveable(), make_arguments(tmp_path, save_strategy="epoch"), train_dataset=make_rows()).train()
    assert len(_global_optimizer_post_hooks) == before
