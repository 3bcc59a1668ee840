"""Weights or losses that become NaN: the last finite checkpoint stays, and the run stops or goes back if told to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, assert_same, outcome
from support.tiny import Net, Task, at, make_resumable, make_rows
from torch import nn

from hftrain import ConfigError, Freeze, NonFiniteError, SavePolicy, StepOutput, Trainer, TrainerCallback
from hftrain.checkpoint.manifest import list_checkpoints, read_manifest, verify
from hftrain.checkpoint.weights import read_weights
from hftrain.run.finiteness import nonfinite_names
from hftrain.storage.tensors import load_containers

pytestmark = pytest.mark.filterwarnings("ignore:The loss was NaN or infinite")


def make_run(folder: Path, *callbacks: Any, bad_steps: Any = (), policy: Any = "warn", **options: Any) -> Trainer:
    """Return a Trainer of 12 steps that saves every second one; the batches of some steps hold NaN."""
    rows = make_rows(48)
    for step in bad_steps:
        rows[4 * step - 2] = {**rows[0], "x": torch.full((4,), math.nan)}
    policy = SavePolicy(on_nonfinite=policy) if isinstance(policy, str) else policy
    defaults = {"save_steps": 2, "max_steps": 12, "train_sampling_strategy": "sequential"}
    return make_resumable(folder, *callbacks, train_dataset=rows, save_policy=policy, **{**defaults, **options})


def found(folder: Path) -> dict[str, bool]:
    """Return which checkpoints there are, and whether they say that they are finite."""
    return {path.name: read_manifest(path).is_finite for path in list_checkpoints(folder)}


def has_finite_weights(folder: Path) -> bool:
    return all(bool(value.isfinite().all()) for value in read_weights(folder).values())


class NanLoss(Task):
    """A loss that is NaN for one batch, and gradients that are not."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        marks = batch["x"].isnan()
        loss, _ = self.model(**{**batch, "x": batch["x"].nan_to_num()})
        return StepOutput(loss=torch.where(marks.any(), loss + math.nan, loss))


@pytest.mark.parametrize("save_async", [False, True])
def test_last_finite_checkpoint_stays_and_loads(tmp_path: Path, caplog: Any, save_async: bool) -> None:
    policy = SavePolicy(save_async=save_async)
    make_run(tmp_path, bad_steps=[7], policy=policy, save_total_limit=2).train()
    assert found(tmp_path) == {"checkpoint-6": True, "checkpoint-12": False}
    assert has_finite_weights(tmp_path / "checkpoint-6")
    assert not has_finite_weights(tmp_path / "checkpoint-12")
    said = [record.getMessage() for record in caplog.records if "is not finite" in record.getMessage()]
    assert len(said) == 1
    # The loss of step 8 is NaN, too.
    assert all(word in said[0] for word in ("checkpoint-8", "layers.0.bias", "2 losses", "checkpoint-6"))
    resumed = make_run(tmp_path, save_total_limit=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert found(tmp_path) == {"checkpoint-10": True, "checkpoint-12": True}


def test_resume_goes_on_with_the_newest_and_names_the_finite_one(tmp_path: Path, caplog: Any) -> None:
    make_run(tmp_path, bad_steps=[7], max_steps=8).train()
    for stop, resume in ((9, True), (10, "auto")):
        caplog.clear()
        trainer = make_run(tmp_path, StopAt(stop), bad_steps=[7])
        trainer.train(resume_from_checkpoint=resume)
        said = [record.getMessage() for record in caplog.records if "resume_from_checkpoint=" in record.getMessage()]
        assert any(f"resume_from_checkpoint='{tmp_path / 'checkpoint-6'}' goes back to it" in each for each in said)
        assert trainer.state.global_step == stop


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("logging_steps", [1, 100])
def test_loss_alone_counts_and_is_told_of_once(tmp_path: Path, filters: bool, logging_steps: int) -> None:
    options = {"logging_nan_inf_filter": filters, "logging_steps": logging_steps}
    make_run(tmp_path, bad_steps=[3], model=NanLoss(), **options).train()
    bad = {"checkpoint-4": False}
    assert found(tmp_path) == {**{f"checkpoint-{step}": True for step in range(2, 13, 2)}, **bad}
    assert has_finite_weights(tmp_path / "checkpoint-4")
    # A resume does not count it again.
    make_run(tmp_path / "cut", StopAt(4), bad_steps=[3], model=NanLoss(), **options).train()
    make_run(tmp_path / "cut", bad_steps=[3], model=NanLoss(), **options).train(resume_from_checkpoint=True)
    assert found(tmp_path / "cut") == found(tmp_path)


@pytest.mark.parametrize("limit", [1, 2, None])
@pytest.mark.parametrize("keep_best", [None, 1])
def test_no_limit_and_no_metric_deletes_the_last_finite_one(tmp_path: Path, limit: Any, keep_best: Any) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}
    policy = SavePolicy(keep_best=keep_best)
    scores = iter(range(6))  # the best is the newest, although its weights are NaN
    trainer = make_run(
        tmp_path, bad_steps=[7], policy=policy, save_total_limit=limit, load_best_model_at_end=keep_best is None,
        compute_metrics=lambda _: {"score": next(scores)}, **options,
    )  # fmt: skip
    trainer.train()
    kept = found(tmp_path)
    assert kept["checkpoint-6"]
    assert not kept["checkpoint-12"]


def test_stop_saves_nothing_that_is_not_finite(tmp_path: Path) -> None:
    trainer = make_run(tmp_path, bad_steps=[7], policy=SavePolicy(on_nonfinite="stop", on_exception=True))
    with pytest.raises(NonFiniteError, match=r", after step 6.") as raised:
        trainer.train()
    assert "Resume from checkpoint-6, the last finite one, with a lower learning_rate" in str(raised.value)
    assert found(tmp_path) == {f"checkpoint-{step}": True for step in (2, 4, 6)}


@pytest.mark.parametrize("save_async", [False, True])
def test_restore_goes_back_and_the_data_go_on(tmp_path: Path, caplog: Any, save_async: bool) -> None:
    policy = SavePolicy(on_nonfinite="restore", save_async=save_async)
    options = {"bad_steps": [5], "policy": policy, "logging_steps": 4}
    whole = make_run(tmp_path / "whole", **options)
    whole.train()
    assert found(tmp_path / "whole") == {f"checkpoint-{step}": True for step in range(2, 13, 2)}
    before, after = (tmp_path / "whole" / f"checkpoint-{step}" for step in (4, 6))
    assert_same(read_weights(after), read_weights(before))
    old, new = (load_containers(folder / "optimizer.pt") for folder in (before, after))
    assert_same(new["state"], old["state"])
    assert new["param_groups"][0]["lr"] == load_containers(after / "scheduler.pt")["_last_lr"][0]
    assert load_containers(after / "scheduler.pt")["last_epoch"] == 6
    rates = [entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-2 * (12 - step) / 12 for step in (3, 7, 11)])
    assert caplog.text.count("Restored weights") == 1
    # Before the restoring save, and after it.
    for stop in (5, 6, 7):
        folder = tmp_path / f"cut{stop}"
        # An error when a step begins.
        fail = at("on_step_begin", lambda args, state, control, stop=stop, **_: 1 / (state.global_step - stop))
        with pytest.raises(ZeroDivisionError):
            make_run(folder, fail, **options).train()
        resumed = make_run(folder, **options)
        resumed.train(resume_from_checkpoint=True)
        assert_same(outcome(resumed), outcome(whole))


@pytest.mark.parametrize("kind", [Net, NanLoss])
def test_save_that_was_not_planned_leaves_going_back_to_the_next_that_is(tmp_path: Path, kind: Any) -> None:
    """A NaN loss is remembered until then, also by the checkpoint."""
    options = {"bad_steps": [5], "policy": "restore", "save_steps": 4, "logging_steps": 12}

    def make(folder: Path, *callbacks: Any) -> Trainer:
        torch.manual_seed(0)
        return make_run(folder, *callbacks, model=kind(), **options)

    whole = make(tmp_path / "whole")
    whole.train()
    for number, stop in ((signal.SIGUSR1, 5), (signal.SIGUSR1, 6), (signal.SIGTERM, 5), (signal.SIGTERM, 6)):
        send = at("on_step_begin", lambda args, state, control, number=number, stop=stop, **_: (
            os.kill(os.getpid(), number) if state.global_step == stop - 1 else None
        ))  # fmt: skip
        folder = tmp_path / f"{number} {stop}"
        cut = make(folder, send)
        with contextlib.suppress(SystemExit):
            cut.train()
        assert not found(folder)[f"checkpoint-{stop}"]
        if number == signal.SIGTERM:
            cut = make(folder)
            cut.train(resume_from_checkpoint=True)
        assert_same(outcome(cut), outcome(whole))


def test_restore_goes_back_to_what_the_clock_has_saved_if_nothing_else_saves(tmp_path: Path) -> None:
    policy = SavePolicy(on_nonfinite="restore", every_s=1e-6)
    make_run(tmp_path, bad_steps=[5], policy=policy, save_strategy="no").train()
    assert all(found(tmp_path).values())
    assert "checkpoint-4" in found(tmp_path)


def test_restore_gives_up(tmp_path: Path) -> None:
    # In each window between two saves, before any and after one.
    for bad_steps, message in (
        ([2], "Cannot save step 2: .* There is no finite checkpoint to restore. Start again with a lower"),
        ([3, 5, 7, 9], "Cannot save step 10: .* Restoring 3 times in a row has not helped. Resume from checkpoint-8,"),
    ):
        folder = tmp_path / str(len(bad_steps))
        with pytest.raises(NonFiniteError, match=message):
            make_run(folder, bad_steps=bad_steps, policy="restore").train()
        resumed = make_run(folder, bad_steps=bad_steps, policy="restore")
        if bad_steps != [2]:
            # Restores before a resume count as well.
            assert read_manifest(folder / "checkpoint-8").facts["restored_in_a_row"] == 3
            with pytest.raises(NonFiniteError, match=message):
                resumed.train(resume_from_checkpoint=True)
    # A finite save between them begins the count again.
    make_run(tmp_path / "on", bad_steps=[3, 5, 9, 11], policy="restore").train()
    assert read_manifest(tmp_path / "on" / "checkpoint-8").facts["restored_in_a_row"] == 0
    assert read_manifest(tmp_path / "on" / "checkpoint-12").facts["restored_in_a_row"] == 2


class Pair(nn.Module):
    """A network, and one whose optimizer user code keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = Net(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return self.net(x, labels)


class Steps(TrainerCallback):
    """Train the second network with an optimizer and a schedule of its own."""

    def __init__(self) -> None:
        self.optimizer: Any = None

    def checkpoint_objects(self) -> dict[str, Any]:
        return {} if self.optimizer is None else {"optimizer": self.optimizer, "schedule": self.schedule}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.Adam(model.critic.parameters(), lr=0.1)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        loss = model.critic(torch.ones(2, 4)).square().mean()
        (loss + (math.nan if state.global_step == 7 else 0) * loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()


def test_restore_takes_the_optimizers_of_the_user_back_and_their_schedules_on(tmp_path: Path) -> None:
    steps = Steps()
    make_run(tmp_path, steps, model=Pair(), policy="restore").train()
    assert found(tmp_path) == {f"checkpoint-{step}": True for step in range(2, 13, 2)}
    (name,) = (each for each in load_containers(tmp_path / "checkpoint-8/own_optimizers.pt") if "optimizer" in each)
    saved = [load_containers(tmp_path / f"checkpoint-{step}/own_optimizers.pt")[name] for step in (6, 8)]
    assert_same(saved[1]["state"], saved[0]["state"])
    assert saved[1]["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.5**8)
    assert steps.schedule.last_epoch == 12


@pytest.mark.parametrize("kind", ["ExponentialLR", "CosineAnnealingLR"])
def test_restore_takes_back_the_groups_added_to_an_optimizer_of_the_user(tmp_path: Path, kind: str) -> None:
    class Grows(Steps):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if self.optimizer is None:
                self.optimizer = torch.optim.Adam([model.critic.weight], lr=0.1)
                self.schedule = getattr(torch.optim.lr_scheduler, kind)(self.optimizer, 0.5)
            if state.global_step == 7:
                self.optimizer.add_param_group({"params": [model.critic.bias], "lr": 0.01})
            super().on_step_end(args, state, control, model, **kwargs)

    make_run(tmp_path, grows := Grows(), model=Pair(), policy="restore").train()
    assert all(found(tmp_path).values())
    assert len(grows.optimizer.param_groups) == len(grows.schedule.base_lrs) == 1


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_restore_with_torchs_optimizers(tmp_path: Path, optim: str) -> None:
    check_optimizer(tmp_path, optim)


@pytest.mark.optimizers
@pytest.mark.parametrize(
    "optim", ["schedule_free_adamw", "galore_adamw_layerwise", "adafactor", "stable_adamw", "lomo"]
)
def test_restore_with_optimizers_of_packages(tmp_path: Path, optim: str) -> None:
    check_optimizer(tmp_path, optim)


def check_optimizer(folder: Path, optim: str) -> None:
    options = {"optim_target_modules": ["layers"]} if optim.startswith("galore") else {}
    if optim.startswith("schedule_free"):
        options["lr_scheduler_type"] = "constant"
    whole = make_run(folder / "whole", bad_steps=[7], policy="restore", optim=optim, **options)
    whole.train()
    assert all(found(folder / "whole").values())
    make_run(folder / "cut", StopAt(9), bad_steps=[7], policy="restore", optim=optim, **options).train()
    resumed = make_run(folder / "cut", bad_steps=[7], policy="restore", optim=optim, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(resumed)["weights"], outcome(whole)["weights"])


def test_overflow_that_the_scaler_skips_is_finite(tmp_path: Path) -> None:
    trainer = make_run(tmp_path, bad_steps=[7], policy="stop", fp16=True)
    trainer.train()
    assert all(found(tmp_path).values())
    assert has_finite_weights(tmp_path / "checkpoint-12")


class Normed(Net):
    """With statistics, a mask of infinities and a trained weight that a callback may spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return super().forward(self.norm(x), labels)


class Spoil(TrainerCallback):
    def __init__(self, name: str, value: float) -> None:
        self.name, self.value = name, value

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            dict([*model.named_parameters(), *model.named_buffers()])[self.name].data[-1] = self.value


@pytest.mark.parametrize(
    ("name", "value", "is_bad"),
    [
        ("norm.running_mean", math.nan, True),
        ("mask", math.nan, True),
        ("mask", math.inf, False),
        ("layers.4.bias", -math.inf, True),
    ],
)
def test_buffers_count_when_they_are_nan(tmp_path: Path, name: str, value: float, is_bad: bool) -> None:
    trainer = make_run(tmp_path, Spoil(name, value), model=Normed(), policy="stop", max_steps=4)
    if not is_bad:
        trainer.train()
        return
    with pytest.raises(NonFiniteError, match=name):
        trainer.train()


def test_large_numbers_are_finite() -> None:
    large = torch.full((64,), torch.finfo(torch.float16).max, dtype=torch.float16, requires_grad=True)
    assert nonfinite_names([("a", large), ("b", torch.ones(2, dtype=torch.long)), ("c", torch.empty(0))]) == []
    assert nonfinite_names([("a", torch.tensor([1.0, -math.inf, math.nan])), ("b", large)]) == ["a"]


def test_policies_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Use one of warn, stop, restore"):
        SavePolicy(on_nonfinite="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with save_only_model=True"):
        make_run(tmp_path, policy="restore", save_only_model=True).train()
    with pytest.warns(UserWarning, match="acts at saves, and save_strategy='no' plans none"):
        make_run(tmp_path, policy="stop", save_strategy="no", max_steps=1).train()


def test_checkpoint_that_does_not_tell_counts_as_finite(tmp_path: Path) -> None:
    make_run(tmp_path, max_steps=2).train()
    path = tmp_path / "checkpoint-2"
    assert verify(path).is_finite
    assert json.loads((path / "manifest.json").read_text())["facts"]["is_finite"] is True
    manifest = read_manifest(path)
    del manifest.facts["is_finite"]
    assert manifest.is_finite


class Unfreeze(TrainerCallback):
    """Unfreeze one layer after each of these steps, and give it to the optimizer."""

    def __init__(self, layers: dict[int, int]) -> None:
        self.layers = layers

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        if state.global_step in self.layers:
            layer = model.layers[self.layers[state.global_step]].requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.02})


def test_restore_leaves_unfrozen_what_the_progress_has_unfrozen(tmp_path: Path) -> None:
    make_run(tmp_path, Freeze("layers.0", until=7), bad_steps=[8], policy="restore").train()
    at_6, at_8, at_12 = (read_weights(tmp_path / f"checkpoint-{step}")["layers.0.weight"] for step in (6, 8, 12))
    assert torch.equal(at_6, at_8)
    assert not torch.equal(at_8, at_12)


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau"])
@pytest.mark.parametrize("earlier", [{}, {3: 1}])
def test_restore_takes_back_the_groups_added_since(
    tmp_path: Path, caplog: Any, earlier: dict[int, int], schedule: str
) -> None:
    def run(name: str, layers: dict[int, int], *callbacks: Any, resume: bool = False) -> Trainer:
        options = {"bad_steps": [8], "policy": "restore", "lr_scheduler_type": schedule, "eval_strategy": "epoch"}
        torch.manual_seed(1)
        model = Net(dropout=0.2)
        model.layers[0].requires_grad_(False)
        model.layers[1].requires_grad_(False)
        trainer = make_run(tmp_path / name, Unfreeze(layers), *callbacks, model=model, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    never, since = run("never", earlier), run("since", {**earlier, 7: 0})
    assert all(found(tmp_path / "since").values())
    names = ("weights", "optimizer", "schedule")
    run("cut", {**earlier, 7: 0}, StopAt(9))
    for trainer in since, run("cut", {}, resume=True):
        assert_same(*({name: outcome(each)[name] for name in names} for each in (trainer, never)))
    assert not since.model.layers[0].weight.requires_grad
    assert "Frozen again, as in that checkpoint: layers.0.weight, layers.0.bias." in caplog.text
