"""Averaged weights: what a loop by hand averages, shown and exported, saved beside the live ones, resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.resuming import Stop
from support.tiny import Net, make_arguments, make_rows, make_trainer

from hftrain import EMA, SWA, CheckpointError, ConfigError, Freeze, SavePolicy, TrainerCallback, set_seed
from hftrain.extras.averaging import WeightAverage


class Note(TrainerCallback):
    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append([p.detach().clone() for p in kwargs["model"].parameters()])


def run(folder: Path, average: Any, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    set_seed(0)
    settings: Any = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "eval_dataset": make_rows(9, seed=2)}
    settings |= {"save_policy": SavePolicy(**options.pop("policy", {}))}
    trainer = make_trainer(folder, Net(0.1), average, *callbacks, **settings | options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_ema_is_that_of_a_loop_by_hand(tmp_path: Path) -> None:
    note = Note()
    trainer = run(tmp_path, EMA(0.9, every=2, warmup=False), note)
    torch.manual_seed(0)
    set_seed(0)
    average = [p.detach().clone() for p in Net(0.1).parameters()]
    for live in note.weights[1::2]:
        for mean, value in zip(average, live, strict=True):
            mean.lerp_(value, 1 - 0.9)
    assert same(weights(trainer), average)
    theirs = torch.optim.swa_utils.AveragedModel(Net(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    set_seed(0)
    net = Net(0.1)
    theirs.module.load_state_dict(net.state_dict())
    theirs.n_averaged += 1
    for live in note.weights[1::2]:
        for parameter, value in zip(net.parameters(), live, strict=True):
            parameter.data.copy_(value)
        theirs.update_parameters(net)
    assert all(
        torch.allclose(a, b, atol=1e-7) for a, b in zip(weights(trainer), theirs.module.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("average", "options", "steps"),
    [(SWA(start=5, every=1), {}, slice(4, None)), (SWA(start=0.5), {"max_steps": 18}, slice(11, None, 6))],
    ids=["steps", "ends of epochs"],
)
def test_swa_is_the_mean_of_the_last_weights(tmp_path: Path, average: SWA, options: Any, steps: slice) -> None:
    note = Note()  # epochs of 6 steps
    trainer = run(tmp_path, average, note, **options)
    means = [torch.stack(each).mean(0) for each in zip(*note.weights[steps], strict=True)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(trainer), means, strict=True))


def test_evaluations_before_the_first_average_show_the_model(tmp_path: Path) -> None:
    settings: Any = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    averaged, plain = (run(tmp_path, each, **settings) for each in (SWA(start=4, every=1), TrainerCallback()))
    first, second = ([e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (averaged, plain))
    assert first == second


def test_warmup_begins_with_a_faster_average() -> None:
    average = EMA(0.99)
    assert average.share() == pytest.approx(0.1)
    average.num_averaged = 10_000
    assert average.share() == pytest.approx(0.99)


@pytest.mark.parametrize("policy", [{}, {"save_async": True}], ids=["now", "behind"])
@pytest.mark.parametrize(
    "average", [EMA(0.9), SWA(2, every=2), EMA(0.9, every=3, device="cpu")], ids=["EMA", "SWA", "cpu"]
)
def test_two_resumes_in_a_row_are_exact(tmp_path: Path, average: WeightAverage, policy: dict[str, Any]) -> None:
    settings: Any = {"eval_strategy": "steps", "eval_steps": 2, "policy": policy}
    whole = run(tmp_path, average, **settings)
    expected, live = weights(whole), load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    assert not same(expected, list(live.values()))
    for step in (3, 5):
        again = run(tmp_path, average, **settings, resume=str(tmp_path / f"checkpoint-{step}"))
        assert same(weights(again), expected)
        assert load_file(tmp_path / "checkpoint-8" / "model.safetensors").keys() == live.keys()
        assert same(list(load_file(tmp_path / "checkpoint-8" / "model.safetensors").values()), list(live.values()))
        assert again.state.log_history[:-1] == whole.state.log_history[:-1] or _but_times(again, whole)


def _but_times(one: Any, other: Any) -> bool:
    def plain(trainer: Any) -> list[Any]:
        return [
            {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
            for entry in trainer.state.log_history
        ]

    return plain(one)[:-1] == plain(other)[:-1]


class Spy(TrainerCallback):
    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            before = [p.detach().clone() for p in kwargs["model"].parameters()]
            self.average = self.trainer.evaluate()["eval_loss"]
            self.live = self.trainer.evaluate(weights="live")["eval_loss"]
            self.trainer.save_model(str(Path(args.output_dir) / "export"))
            self.predicted = self.trainer.predict(make_rows(9, seed=2)).metrics["test_loss"]
            assert same(before, [p.detach() for p in kwargs["model"].parameters()])


def test_evaluations_and_exports_show_the_average(tmp_path: Path) -> None:
    set_seed(0)
    average, spy = EMA(0.9), Spy()
    trainer = make_trainer(tmp_path, Net(0.1), average, spy, max_steps=5, eval_dataset=make_rows(9, seed=2))
    spy.trainer = trainer
    plain = make_trainer(tmp_path / "plain", Net(0.1), max_steps=5, eval_dataset=make_rows(9, seed=2))
    set_seed(0)
    plain.model.load_state_dict(Net(0.1).state_dict())
    trainer.model.load_state_dict(plain.model.state_dict())
    set_seed(1)
    trainer.train()
    set_seed(1)
    plain.train()
    assert spy.live == pytest.approx(plain.evaluate()["eval_loss"])
    assert spy.average != pytest.approx(spy.live)
    assert spy.predicted == pytest.approx(spy.average)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert same([exported[name] for name, _ in trainer.model.named_parameters()], weights(trainer))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(spy.average)
    with pytest.raises(ConfigError, match="weights="):
        trainer.evaluate(weights="best")
    with pytest.raises(ConfigError, match="after the training"):
        trainer.evaluate(weights="live")


def test_best_model_is_the_average_of_the_best_step(tmp_path: Path) -> None:
    settings: Any = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.3}
    trainer = run(tmp_path, EMA(0.8), **settings, metric_for_best_model="loss")
    best = trainer.state.best_global_step
    assert best < 8
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


def test_best_model_from_checkpoints_without_averages_is_refused(tmp_path: Path) -> None:
    settings: Any = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    with pytest.raises(ConfigError, match="not the averages that were evaluated"):
        run(tmp_path, EMA(0.8), save_only_model=True, **settings)


def test_stop_within_an_epoch_is_not_its_end(tmp_path: Path) -> None:
    """A checkpoint that is saved as the run stops must not hold an average that an uninterrupted run never made."""
    settings: Any = {"max_steps": 18, "save_strategy": "epoch"}  # epochs of 6 steps
    expected = weights(run(tmp_path / "whole", SWA(start=2), **settings))
    run(tmp_path / "parts", SWA(start=2), Stop(9), **settings)
    assert same(weights(run(tmp_path / "parts", SWA(start=2), resume=True, **settings)), expected)


def test_parameters_that_are_unfrozen_are_averaged_from_then_on(tmp_path: Path) -> None:
    class Unfreeze(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                kwargs["model"].layers[0].requires_grad_(False)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                kwargs["model"].layers[0].requires_grad_(True)

    class First(Unfreeze):
        """Comes before the average."""

    average = EMA(0.9)
    whole = run(tmp_path, First(), average)
    assert len(average.averages) == len(list(whole.model.parameters()))
    expected = weights(whole)
    for step in (3, 6):
        assert same(weights(run(tmp_path, First(), EMA(0.9), resume=str(tmp_path / f"checkpoint-{step}"))), expected)


@pytest.mark.parametrize("is_first", [False, True], ids=["average, freeze", "freeze, average"])
def test_resumes_are_exact_while_parts_are_frozen_and_afterwards(tmp_path: Path, is_first: bool) -> None:
    def callbacks() -> list[Any]:
        both = [EMA(0.9), Freeze("layers.0", until=4)]
        return both[::-1] if is_first else both

    expected = weights(run(tmp_path, *callbacks()))
    for step in (3, 6):
        assert same(weights(run(tmp_path, *callbacks(), resume=str(tmp_path / f"checkpoint-{step}"))), expected)


def test_averages_of_another_model_are_refused(tmp_path: Path) -> None:
    average = EMA()
    run(tmp_path, average)
    average.on_train_begin(make_arguments(tmp_path), None, None, model=torch.nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match=r"no parameters named layers\.0"):
        average.make_room({"averages": {"layers.0.weight": torch.zeros(1)}})


@pytest.mark.parametrize("wrong", [lambda: EMA(1.0), lambda: EMA(every=0), lambda: SWA(-1), lambda: SWA(every=0)])
def test_values_out_of_range_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"EMA|SWA"):
        wrong()
