"""Parameters that are unfrozen, or added to the optimizer, during a run: scheduled, saved, and there at a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, check_resumes
from support.tiny import Net, at, make_arguments, make_rows
from torch.optim import lr_scheduler as schedules

from hftrain import CheckpointError, Trainer, TrainerCallback, set_seed
from hftrain.extras.added_groups import admit_group


class Unfreeze(TrainerCallback):
    """Unfreeze the last layer at step 4, and give it to the optimizer with a rate of its own."""

    def __init__(self, *, adds: bool = True, step: int = 4) -> None:
        self.adds, self.step = adds, step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            model.layers[4].requires_grad_(True)
            if self.adds:
                kwargs["optimizer"].add_param_group({"params": list(model.layers[4].parameters()), "lr": 0.02})


def frozen() -> Net:
    set_seed(1)
    model = Net(dropout=0.2)
    model.layers[4].requires_grad_(False)
    return model


def make(folder: Path, *callbacks: Any, schedule: Any = None, adds: bool = True, **options: Any) -> Trainer:
    model = frozen()
    args = make_arguments(
        folder, **{"max_steps": 10, "save_strategy": "steps", "save_steps": 100, "eval_strategy": "steps",
                   "eval_steps": 1, "warmup_steps": 2, "optim": "sgd", **options}
    )  # fmt: skip
    optimizers: Any = (None, None)
    if schedule is not None or not adds:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if adds:
            optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
        optimizers = (optimizer, schedule and schedule(optimizer))
    return Trainer(
        model, args, train_dataset=make_rows(), eval_dataset=make_rows(4, seed=2), optimizers=optimizers,
        callbacks=[Unfreeze(adds=adds), *callbacks],
    )  # fmt: skip


def check(tmp_path: Path, *stops: int, **options: Any) -> Trainer:
    whole, resumed = check_resumes(partial(make, **options), tmp_path, stops)
    assert not any(map(torch.equal, frozen().layers[4].parameters(), whole.model.layers[4].parameters()))
    return resumed


NAMED = ["linear", "cosine", "constant_with_warmup", "polynomial", "reduce_lr_on_plateau"]
OWN = {
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 6]),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=11),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.CosineAnnealingLR(o, 3)], [6]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.StepLR(o, 3), schedules.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.parametrize("name", [*NAMED, pytest.param("greedy", marks=pytest.mark.interop)])
@pytest.mark.parametrize("stop", [3, 4, 7])
def test_added_group_follows_a_named_schedule_and_is_resumed(tmp_path: Path, name: str, stop: int) -> None:
    options: dict[str, Any] = {"warmup_steps": 0} if name in ("reduce_lr_on_plateau", "greedy") else {}
    resumed = check(tmp_path, stop, lr_scheduler_type=name, **options)
    assert len(resumed.optimizer.param_groups) > 1


@pytest.mark.parametrize("name", OWN)
def test_added_group_follows_a_schedule_of_torch_and_is_resumed(tmp_path: Path, name: str) -> None:
    check(tmp_path, 6, schedule=OWN[name])


def test_added_group_has_its_own_rate_times_the_schedule(tmp_path: Path) -> None:
    rates: list[list[float]] = []
    note = at(
        "on_pre_optimizer_step",
        lambda *args, optimizer, **kwargs: rates.append([group["lr"] for group in optimizer.param_groups]),
    )
    make(tmp_path, note, learning_rate=0.01, warmup_steps=0, save_strategy="no").train()
    assert [len(each) for each in rates] == [2] * 4 + [3] * 6
    assert [each[-1] for each in rates[4:]] == pytest.approx([0.02 * (1 - step / 10) for step in range(4, 10)])
    assert [each[0] for each in rates] == pytest.approx([0.01 * (1 - step / 10) for step in range(10)])


@pytest.mark.parametrize(
    ("make_parts", "rate"),
    [
        (lambda o: [schedules.LambdaLR(o, lambda step, rate=rate: rate) for rate in (1.0, 0.5)], 0.1),
        (lambda o: [schedules.StepLR(o, 1, gamma=0.5), schedules.ConstantLR(o)], 0.2),  # they change the current rate
    ],
)
def test_group_added_where_one_schedule_follows_another_begins_with_the_second(make_parts: Any, rate: float) -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters[:1], lr=0.1)
    schedule = schedules.SequentialLR(optimizer, make_parts(optimizer), milestones=[2])
    for each in (optimizer, schedule) * 2:
        each.step()
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.2})
    admit_group(schedule, optimizer.param_groups[-1])
    assert (optimizer.param_groups[0]["lr"] < 0.1, optimizer.param_groups[1]["lr"]) == (True, rate)


def test_unfrozen_parameters_that_the_optimizer_had_are_resumed(tmp_path: Path) -> None:
    check(tmp_path, 7, adds=False)


def test_second_resume_knows_the_group(tmp_path: Path) -> None:
    check(tmp_path, 5, 7)


def test_group_of_parameters_outside_the_model_is_told_about(tmp_path: Path) -> None:
    class Foreign(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})

    make(tmp_path, Foreign(), StopAt(5)).train()
    with pytest.raises(CheckpointError, match="override create_optimizer"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_optimizer_is_as_it_was_after_a_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_strategy="no")
    trainer.train()
    assert trainer.optimizer is not None
    assert "add_param_group" not in vars(trainer.optimizer)


@pytest.mark.parametrize("optim", ["adamw_torch", "rmsprop"])
def test_added_group_is_updated_by_the_same_kernel(tmp_path: Path, optim: str) -> None:
    trainer = check(tmp_path, 6, optim=optim)
    assert trainer.optimizer is not None
    assert [group.get("fused") for group in trainer.optimizer.param_groups] == [optim == "adamw_torch" or None] * 3
