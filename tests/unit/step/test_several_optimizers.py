"""Several optimizers: stepped together or by a task itself, as a hand-written loop does, and resumed exactly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gan import Gan, losses, make, networks, rows, weights
from support.resuming import Stop
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from hftrain import Freeze, StepOutput, TaskModule
from hftrain.core.errors import CheckpointError, ConfigError, StrategyError, TaskError
from hftrain.core.types import Owns
from hftrain.extras.own_optimizers.by_hand import OptimizersByHand
from hftrain.extras.own_optimizers.several import Optimizers
from hftrain.precision.registry import precisions
from hftrain.rules.task import read_optimizers
from hftrain.step.legality import check_several


class Together(Gan):
    """All step for one loss, as the default is."""

    automatic_optimization = True

    def training_step(self, batch: Any) -> torch.Tensor:
        of_critic, of_generator = losses(self.model, batch)
        return of_critic() + of_generator()


class Fixed(Together):
    """Returns given optimizers."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def configure_optimizers(self) -> Any:
        return self.made(self.model) if callable(self.made) else self.made


def batches(trainer: Any) -> list[Any]:
    return list(trainer.get_train_dataloader())


def by_hand(batches: list[Any], *, max_norm: float = 1.0) -> list[list[float]]:
    """The loop that one would write."""
    model = networks()
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=0.02) for name, net in model.items()}
    for batch in batches:
        for name, loss in zip(("critic", "generator"), losses(model, batch), strict=True):
            model.zero_grad()
            loss().backward()
            nn.utils.clip_grad_norm_(model[name].parameters(), max_norm)
            optimizers[name].step()
    return [p.flatten().tolist() for p in model.parameters()]


def test_a_gan_trains_as_in_a_loop_by_hand(tmp_path: Path) -> None:
    trainer = make(tmp_path, dataloader_drop_last=True)
    expected = by_hand(batches(make(tmp_path))[:6])
    trainer.train()
    assert weights(trainer) == expected
    last = trainer.state.log_history[-2]
    assert trainer.state.global_step == 6
    assert (last["num_updates/critic"], last["num_updates/generator"], last["step"]) == (6, 6, 6)
    total = torch.tensor([last["grad_norm/critic"], last["grad_norm/generator"]]).norm()
    assert last["grad_norm"] == pytest.approx(float(total))
    assert all(p.requires_grad for p in trainer.model.parameters())


def test_optimizers_step_together_as_one_with_groups(tmp_path: Path) -> None:
    one = make(tmp_path / "one", Fixed(lambda model: torch.optim.Adam(model.parameters(), lr=0.02)))
    several = make(tmp_path / "several", Together())
    for trainer in (one, several):
        trainer.train()
    assert weights(one) == weights(several)
    logs = several.state.log_history[0]
    assert logs["grad_norm"] == one.state.log_history[0]["grad_norm"]
    assert {"grad_norm/critic", "grad_norm/generator", "num_updates/critic"} <= logs.keys()


@pytest.mark.parametrize("kind", [Gan, Together])
def test_schedule_of_the_arguments_drives_all(tmp_path: Path, kind: Any) -> None:
    trainer = make(tmp_path, kind(), lr_scheduler_type="linear")
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history[:-1]]
    assert rates == pytest.approx([0.02 * (6 - step) / 6 for step in range(6)])
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "precision"), [({}, "fp32"), ({"takes_turns": True}, "fp16"), ({"takes_turns": True}, "bf16")]
)
def test_two_resumes_in_a_row_are_exact(tmp_path: Path, options: Any, precision: str) -> None:
    settings: Any = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 1, "max_steps": 7}
    settings |= {precision: True} if precision != "fp32" else {}
    whole = make(tmp_path / "whole", Gan(**options), **settings)
    whole.train()
    found = whole
    for step in (3, 4):  # each from the run before, of which it overwrites what comes after
        found = make(tmp_path / "whole", Gan(**options), **settings)
        found.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert weights(found) == weights(whole)
    for member in found.optimizer.members.values():
        assert len(member.state) == sum(len(group["params"]) for group in member.param_groups)
    if options:
        last = found.state.log_history[-2]
        assert (last["num_updates/critic"], last["num_updates/generator"]) == (4, 3)
        assert "grad_norm/generator" not in last
        assert last["grad_norm"] == last["grad_norm/critic"]


def own(model: Any, **timing: Any) -> Any:
    """Optimizers with schedules: after updates, after epochs, and on a metric."""
    critic, generator = (torch.optim.SGD(model[name].parameters(), lr=1.0) for name in ("critic", "generator"))
    timing = timing or {"scheduler": StepLR(generator, 1, gamma=0.5), "interval": "epoch"}
    return {
        "critic": (critic, LambdaLR(critic, lambda step: 0.9**step)),
        "generator": {"optimizer": generator, "lr_scheduler": {**timing}},
    }


def test_schedules_have_intervals_of_their_own(tmp_path: Path) -> None:
    settings: Any = {"max_steps": 9, "per_device_train_batch_size": 16, "save_strategy": "steps", "save_steps": 1}
    trainer = make(tmp_path, Fixed(own), **settings)
    trainer.train()  # 3 steps in an epoch
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.9**9, 0.5**3])
    for step in (3, 4):
        resumed = make(tmp_path, Fixed(own), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert weights(resumed) == weights(trainer)
        assert [g["lr"] for g in resumed.optimizer.param_groups] == [g["lr"] for g in trainer.optimizer.param_groups]


class Counting(LambdaLR):
    """Has an attribute of a common name."""

    def __init__(self, optimizer: Any) -> None:
        self.count = 100
        super().__init__(optimizer, lambda step: 0.9**step)


def test_a_stop_within_an_epoch_does_not_end_it(tmp_path: Path) -> None:
    """`save_strategy="epoch"` saves then, too: a resumed run would step the schedule of the epoch once more."""

    def made(model: Any) -> Any:
        found = own(model)
        return {**found, "critic": (found["critic"][0], Counting(found["critic"][0]))}

    settings: Any = {"max_steps": 9, "per_device_train_batch_size": 16, "save_strategy": "epoch"}
    whole = make(tmp_path / "whole", Fixed(made), **settings)
    whole.train()
    stopped = make(tmp_path / "parts", Fixed(made), **settings)
    stopped.add_callback(Stop())
    stopped.train()
    resumed = make(tmp_path / "parts", Fixed(made), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert weights(resumed) == weights(whole)
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()


class Worsens(Fixed):
    """Has a loss that grows from evaluation to evaluation."""

    num = 0.0

    def evaluation_step(self, batch: Any) -> torch.Tensor:
        self.num += 1.0
        return torch.tensor(self.num)


def test_a_schedule_follows_a_metric(tmp_path: Path) -> None:
    def on_loss(model: Any, monitor: str = "eval_loss") -> Any:
        made = own(model)
        optimizer = made["generator"]["optimizer"]
        timing = {"scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0), "monitor": monitor}
        return {**made, "generator": {"optimizer": optimizer, "lr_scheduler": timing}}

    settings: Any = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(4), "max_steps": 3}
    settings["eval_on_start"] = True  # which does not count
    trainer = make(tmp_path, Worsens(on_loss), **settings)
    trainer.train()
    assert trainer.optimizer.members["generator"].param_groups[0]["lr"] == 0.25
    with pytest.raises(TaskError, match="share"):
        make(tmp_path, Worsens(lambda model: on_loss(model, "share")), **settings).train()


def test_a_single_optimizer_takes_lightnings_form(tmp_path: Path) -> None:
    def made(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "epoch", "frequency": 2},
        }

    trainer = make(tmp_path, Fixed(made), per_device_train_batch_size=16, max_steps=15)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert trainer.callback_handler.callbacks.count(trainer.lr_scheduler) == 1
    trainer.train()
    assert sum(type(each).__name__ == "Schedules" for each in trainer.callback_handler.callbacks) == 1


MODEL = networks()
SGD, OTHER = torch.optim.SGD(MODEL["critic"].parameters()), torch.optim.SGD(MODEL["generator"].parameters())


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ([SGD, OTHER], "by name"),
        (([SGD, OTHER], []), "by name"),
        ({}, "no optimizer"),
        ({"a": SGD, "b": 3}, "int"),
        ({"a": SGD, "b": SGD}, "same parameter"),
        ({"a": (SGD, StepLR(SGD, 1)), "b": OTHER}, "only a"),
        ({"optimizer": SGD, "lr_scheduler": StepLR(SGD, 1)}, "interval=None"),
        ({"optimizer": SGD, "lr_scheduler": {"scheduler": StepLR(SGD, 1), "strict": False}}, "strict"),
    ],
    ids=["list", "lists", "none", "number", "shared", "one schedule", "no interval", "strict"],
)
def test_what_cannot_be_read_is_refused(made: Any, named: str) -> None:
    with pytest.raises((TaskError, ConfigError), match=named):
        read_optimizers(Fixed(made))


class Closures(TaskModule):
    """Fit a line with LBFGS, which runs the model as often as it likes."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.model.parameters(), max_iter=10, line_search_fn="strong_wolfe")

    def training_step(self, batch: Any) -> StepOutput:
        def loss() -> torch.Tensor:
            return (self.model(batch["real"]) - batch["real"].sum(1, keepdim=True)).square().mean()

        self.optimizers["optimizer"].step(loss)
        return StepOutput(loss=loss().detach())


def test_lbfgs_fits_through_a_closure(tmp_path: Path) -> None:
    settings: Any = {"max_steps": 3, "max_grad_norm": 0.0, "per_device_train_batch_size": 48, "save_steps": 1}
    trainer = make(tmp_path, Closures(), **settings, save_strategy="steps")
    trainer.train()
    assert trainer.state.log_history[-2]["loss"] < 1e-8
    resumed = make(tmp_path, Closures(), **settings, save_strategy="steps")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert weights(resumed) == weights(trainer)
    with pytest.raises(TaskError, match="closure"):
        make(tmp_path, Closures(), **{**settings, "gradient_accumulation_steps": 2}).train()
    with pytest.raises(ConfigError, match="automatic_optimization"):
        make(tmp_path, Fixed(lambda model: torch.optim.LBFGS(model.parameters()))).train()


def test_gradients_of_lbfgs_are_not_clipped(tmp_path: Path) -> None:
    """It compares gradients of several points: with clipped ones it may diverge."""
    settings: Any = {"max_steps": 3, "per_device_train_batch_size": 48}
    torch.manual_seed(0)
    plain = make(tmp_path, Closures(), **settings, max_grad_norm=0.0)
    plain.train()
    torch.manual_seed(0)
    clipped = make(tmp_path, Closures(), **settings, max_grad_norm=1e-3)
    with pytest.warns(UserWarning, match="LBFGS is not clipped"):
        clipped.train()
    assert weights(clipped) == weights(plain)


def test_optimizer_of_frozen_parameters_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, callbacks=[Freeze("generator", until="3ba")])
    with pytest.raises(TaskError, match=r"(?s)'generator'.*frozen"):
        trainer.train()


class Forgets(Gan):
    def training_step(self, batch: Any) -> StepOutput:
        loss = losses(self.model, batch)[0]()
        self.optimizers["critic"].backward(loss)
        return StepOutput(loss=loss)


class StepsItself(Gan):
    def training_step(self, batch: Any) -> Any:
        losses(self.model, batch)[0]().backward()
        return self.optimizers["critic"].optimizer.step()


def minimizing(name: str) -> Gan:
    step = lambda own, batch: own.optimizers[name].minimize(losses(own.model, batch)[0]())  # noqa: E731
    return type("Minimizes", (Gan,), {"training_step": step})()


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (Forgets(), "not used"),
        (minimizing("nobody"), "nobody"),
        (type("Steps", (Gan,), {"training_step": lambda own, _: own.optimizers["critic"].step()})(), "no backward"),
        (StepsItself(), "its own step"),
        (minimizing("generator"), "does not depend"),
    ],
)
def test_mistakes_by_hand_are_named(tmp_path: Path, task: TaskModule, named: str) -> None:
    with pytest.raises(TaskError, match=named):
        make(tmp_path, task).train()


class OneStep(Gan):
    """Lacks an evaluation step."""

    evaluation_step = TaskModule.evaluation_step


def test_an_evaluation_does_not_train(tmp_path: Path) -> None:
    trainer = make(tmp_path, OneStep())
    trainer.train()
    with pytest.raises(TaskError, match="evaluation_step"):
        trainer.evaluate(rows(4))
    whole = make(tmp_path)
    whole.train()
    assert "eval_loss" in whole.evaluate(rows(4))


def test_what_cannot_step_several_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto_find_batch_size"):
        make(tmp_path, auto_find_batch_size=True).train()
    trainer = make(tmp_path, Together())
    trainer.create_optimizer()
    assert isinstance(trainer.optimizer, Optimizers)
    with pytest.raises(ConfigError, match="group"):
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_strategies_that_step_themselves_refuse() -> None:
    engine: Any = SimpleNamespace(owns=Owns.BACKWARD | Owns.STEP, name="deepspeed", world_size=2, shards_model=False)
    optimizers = Optimizers({"a": SGD, "b": OTHER})
    with pytest.raises(StrategyError, match="deepspeed"):
        check_several(optimizers, engine)
    check_several(SGD, engine)
    own = OptimizersByHand(Gan(), {"a": SGD, "b": OTHER})
    for name, shards in (("xla", False), ("tp", True)):
        strategy: Any = SimpleNamespace(owns=Owns.NOTHING, name=name, world_size=2, shards_model=shards)
        with pytest.raises(StrategyError, match=name):
            own.assemble(strategy, precisions.create("fp32"), SimpleNamespace(max_grad_norm=1.0), None)


class Renamed(Together):
    def configure_optimizers(self) -> Any:
        return dict(reversed(super().configure_optimizers().items()))


def test_other_optimizers_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    settings: Any = {"save_strategy": "steps", "save_steps": 3}
    make(tmp_path, Together(), **settings).train()
    with pytest.raises(CheckpointError, match="generator"):
        make(tmp_path, Renamed(), **settings).train(resume_from_checkpoint=True)


def test_a_rehearsal_before_and_after_a_training_changes_nothing(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", Gan())
    whole.train()
    trainer = make(tmp_path / "other", Gan(), fast_dev_run=2, save_strategy="steps", save_steps=1)
    before = weights(trainer)
    trainer.train()
    assert weights(trainer) == before
    trainer.fast_dev_run = 0
    trainer.train()
    assert weights(trainer) == weights(whole)
    trainer.fast_dev_run = 1
    trainer.train()
    assert weights(trainer) == weights(whole)


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    whole = make(tmp_path, Gan(takes_turns=True), per_device_train_batch_size=6)
    parts = make(tmp_path, Gan(takes_turns=True), gradient_accumulation_steps=3)
    for trainer in (whole, parts):
        trainer.train()
    for ours, theirs in zip(weights(parts), weights(whole), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


class Overflows(Gan):
    """Both backward passes come first; the gradients of the critic overflow in the second step."""

    def __init__(self, overflows: bool) -> None:
        super().__init__()
        self.overflows, self.num = overflows, 0

    def configure_optimizers(self) -> Any:
        made = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in self.model.items()}
        return {name: (each, StepLR(each, 1, gamma=0.5)) for name, each in made.items()}

    def training_step(self, batch: Any) -> StepOutput:
        self.num += 1
        of_critic, of_generator = (loss() for loss in losses(self.model, batch))
        critic, generator = self.optimizers["critic"], self.optimizers["generator"]
        generator.max_grad_norm = 0.01
        with generator.toggle():
            assert not any(p.requires_grad for p in critic.parameters)
            assert all(p.requires_grad for p in generator.parameters)
        critic.backward(of_critic * 1e30 if self.overflows and self.num == 2 else of_critic * 0.0)
        generator.backward(of_generator)
        self.updated = critic.step(), generator.step()
        return StepOutput(loss=of_generator)


def test_an_overflow_of_one_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    trained = []
    for overflows in (False, True):
        task = Overflows(overflows)
        trainer = make(tmp_path, task, fp16=True, max_steps=2)
        trainer.train()
        trained.append(weights(trainer))
        assert task.updated == (not overflows, True)
        rates = {name: each.param_groups[0]["lr"] for name, each in trainer.optimizer.members.items()}
        assert rates == {"critic": 0.05 if overflows else 0.025, "generator": 0.025}
        assert trainer.state.log_history[-2]["grad_norm/generator"] > 0.01
    assert trained[0] == trained[1]
    moved = [torch.tensor(p).sub(q.flatten()).norm() for p, q in zip(trained[0], networks().parameters(), strict=True)]
    assert 0 < torch.stack(moved).norm() <= 0.1 * 0.01 * 1.6


class FirstOverflows(Gan):
    """Steps the critic only, whose first gradients overflow."""

    def training_step(self, batch: Any) -> StepOutput:
        loss = losses(self.model, batch)[0]()
        is_first = self.optimizers.run.precision.logs()["loss_scale"] > 4e4
        self.optimizers["critic"].minimize(loss * 1e30 if is_first else loss)
        return StepOutput(loss=loss)


def test_the_schedule_of_the_arguments_waits_for_an_update(tmp_path: Path) -> None:
    trainer = make(tmp_path, FirstOverflows(), fp16=True, lr_scheduler_type="linear", max_steps=4)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history[:-1]]
    assert rates == pytest.approx([0.02, 0.02, 0.015, 0.01])


class CriticTwice(Gan):
    """Steps the critic twice while the gradients of the generator wait."""

    def configure_optimizers(self) -> Any:
        return {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in self.model.items()}

    def training_step(self, batch: Any) -> StepOutput:
        of_critic, of_generator = losses(self.model, batch)
        self.optimizers["generator"].backward(loss := of_generator())
        for _ in range(2):
            self.optimizers["critic"].minimize(of_critic())
        self.optimizers["generator"].step()
        return StepOutput(loss=loss)


def test_an_optimizer_steps_twice_while_another_waits_also_in_fp16(tmp_path: Path) -> None:
    trained = []
    for fp16 in (False, True):
        trainer = make(tmp_path, CriticTwice(), fp16=fp16, max_steps=4)
        trainer.train()
        trained.append(weights(trainer))
        assert trainer.state.log_history[-2]["num_updates/critic"] == 8
    for ours, theirs in zip(*trained, strict=True):
        assert ours == pytest.approx(theirs, abs=5e-3)
