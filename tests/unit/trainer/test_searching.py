"""`train(trial=...)` and `hyperparameter_search` with Optuna itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, at, make_arguments, make_rows
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from hftrain import BestRun, ConfigError, EvalSet, StepOutput, Trainer, TrainerCallback
from hftrain.extras.search.defaults import default_compute_objective


class Look(TrainerCallback):
    """Note what each run is made with."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.ended = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.runs.append(
            {
                "args": args.to_dict(),
                "lr": kwargs["optimizer"].param_groups[0]["lr"],
                "weight": next(kwargs["model"].parameters()).detach().flatten()[:4].tolist(),
                "batch_size": state.train_batch_size,
                "state": (state.is_hyper_param_search, state.trial_name, state.trial_params),
                "optimizer": id(kwargs["optimizer"]),
            }
        )

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended += 1


def make(folder: Path, **options: Any) -> tuple[Trainer, Look]:
    look = Look()
    parts = {
        name: options.pop(name)
        for name in ("model_init", "eval_dataset", "compute_metrics", "model", "train_dataset")
        if name in options
    }
    parts = {"model_init": Net, "train_dataset": make_rows(), "eval_dataset": make_rows(8), **parts}
    args = make_arguments(folder, lr_scheduler_type="constant", num_train_epochs=1, **options)
    return Trainer(args=args, callbacks=[look], **parts), look


class Measured(Task):
    """A task whose accuracy is a torchmetric."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")

    def evaluation_step(self, batch: Any) -> StepOutput:
        output = self.training_step(batch)
        self.accuracy.update(output.outputs, output.labels)
        return output


def search_rates(trainer: Trainer, **options: Any) -> tuple[BestRun, list[dict[str, float]]]:
    """Search two learning rates, of which the second learns nothing; return what each trial's evaluation reports."""
    samplers = pytest.importorskip("optuna").samplers
    found: list[dict[str, float]] = []

    trainer.add_callback(at("on_evaluate", lambda *args, metrics, **kwargs: found.append(metrics)))
    space = {"learning_rate": [0.05, 0.0]}
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", space["learning_rate"])},
        n_trials=2, sampler=samplers.GridSampler(space, seed=0), **options,
    )  # fmt: skip
    assert isinstance(best, BestRun)
    return best, found


def test_search_minimizes_the_loss_of_a_task(tmp_path: Path) -> None:
    rows = [{"x": row["x"], "labels": row["x"][:3].argmax()} for row in make_rows(32)]
    trainer, _ = make(tmp_path, model_init=Measured, train_dataset=rows, eval_dataset=rows, eval_strategy="epoch")
    with pytest.warns(UserWarning, match=r"minimizes eval_loss.*eval_accuracy"):
        best, found = search_rates(trainer)
    assert best.objective == min(each["eval_loss"] for each in found)
    assert best.hyperparameters == {"learning_rate": 0.05}
    best, found = search_rates(trainer, direction="maximize")
    assert best.objective == pytest.approx(max(each["eval_accuracy"] for each in found))
    assert best.hyperparameters == {"learning_rate": 0.05}


def test_search_says_that_it_minimizes_a_metric(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, eval_strategy="epoch", compute_metrics=lambda _: {"error": trainer.args.learning_rate})
    with pytest.warns(UserWarning, match=r"minimizes eval_error.*direction='maximize'"):
        best, _ = search_rates(trainer)
    assert best.objective == 0.0


def test_search_without_a_loss_to_minimize_is_refused(tmp_path: Path) -> None:
    class Silent(Measured):
        def evaluation_step(self, batch: Any) -> StepOutput:
            output = super().evaluation_step(batch)
            return StepOutput(outputs=output.outputs, labels=output.labels)

    trainer, _ = make(tmp_path, model_init=Silent, eval_strategy="epoch")
    with pytest.raises(ConfigError, match=r"would be minimized: eval_accuracy.*direction='maximize'"):
        search_rates(trainer)


# -- train(trial=...) ------------------------------------------------------------------------------------------------


def test_dict_of_hyperparameters_is_applied_for_the_run_alone(tmp_path: Path) -> None:
    trainer, look = make(tmp_path, save_strategy="epoch")
    before = trainer.args.to_dict()
    trainer.train(trial={"learning_rate": "3e-3", "per_device_train_batch_size": 2.0, "optim": "sgd", "seed": 7})
    run = look.runs[0]
    assert run["lr"] == 3e-3
    assert run["batch_size"] == 2
    assert type(run["args"]["per_device_train_batch_size"]) is int
    assert type(trainer.optimizer) is torch.optim.SGD
    assert run["state"] == (
        True,
        None,
        {"learning_rate": "3e-3", "per_device_train_batch_size": 2.0, "optim": "sgd", "seed": 7},
    )
    assert trainer.args.to_dict() == before
    # A plain dict is no part of a search: its checkpoints are where any run's are.
    assert (tmp_path / "checkpoint-11").is_dir()
    saved = json.loads((tmp_path / "checkpoint-11/trainer_state.json").read_text())
    assert saved["is_hyper_param_search"] is True
    trainer.train()
    assert look.runs[1]["state"] == (False, None, None)
    assert look.runs[1]["lr"] == 1e-2


def test_seed_of_a_trial_makes_its_model(tmp_path: Path) -> None:
    trainer, look = make(tmp_path)
    for seed in (7, 8, 7):
        trainer.train(trial={"seed": seed})
    first, second, third = (run["weight"] for run in look.runs)
    torch.manual_seed(7)
    assert first == third == next(Net().parameters()).detach().flatten()[:4].tolist()
    assert first != second


def test_noise_of_a_trial_is_its_own(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
            return (nn.functional.cross_entropy(self.head(self.embed(ids)), labels),)

    rows = [{"ids": torch.tensor(i % 5), "labels": torch.tensor(i % 3)} for i in range(8)]
    trainer, _ = make(tmp_path, model_init=Words, train_dataset=rows, eval_dataset=rows)
    losses = [trainer.train(trial=trial).training_loss for trial in ({}, {"neftune_noise_alpha": 50.0}, {})]
    assert losses[0] == losses[2] != losses[1]
    assert trainer.neftune_noise_alpha is None


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        ({"learning_rte": 1.0}, "'learning_rte'.*Did you mean 'learning_rate'"),
        ({"per_device_train_batch_size": 2.5}, "takes int"),
        ({"learning_rate": "fast"}, "takes float"),
        ({"group_by_length": "perhaps"}, "takes bool"),
        ({"bf16": True}, "defines how a Trainer is built"),
        ({"output_dir": "x"}, "defines how a Trainer is built"),
        ({"optim": "adamm"}, "adamm"),
        (3, "A int is not a trial"),
    ],
)
def test_trial_that_cannot_be_applied_is_refused(tmp_path: Path, trial: Any, message: str) -> None:
    trainer, look = make(tmp_path)
    before = trainer.args.to_dict()
    with pytest.raises(ConfigError, match=message):
        trainer.train(trial=trial)
    assert trainer.args.to_dict() == before
    assert look.runs == []


def test_trial_needs_a_model_init(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows(), eval_dataset=make_rows(4))
    with pytest.raises(ConfigError, match="no model_init"):
        trainer.train(trial={"learning_rate": 1.0})
    with pytest.raises(ConfigError, match="no model_init"):
        trainer.hyperparameter_search(backend="optuna")


def test_model_init_sees_hyperparameters_that_are_no_settings(tmp_path: Path, caplog: Any) -> None:
    seen: list[Any] = []

    def model_init(trial: Any) -> nn.Module:
        seen.append(trial)
        return Net(dropout=trial["dropout"] if trial else 0.0)

    trainer, _ = make(tmp_path, model_init=model_init)
    trainer.train(trial={"dropout": 0.5, "learning_rate": 1e-3})
    assert seen == [None, {"dropout": 0.5, "learning_rate": 1e-3}]
    assert trainer.model.layers[3].p == 0.5
    assert "['dropout']" in caplog.text


def test_search_without_evaluation_data_is_refused(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, eval_dataset=None)
    with pytest.raises(ConfigError, match="no eval_dataset"):
        trainer.hyperparameter_search(backend="optuna")


def test_deepspeed_settings_follow_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the engine: what counts is that it is told, and that the accelerator is made anew."""
    trainer, _ = make(tmp_path)
    told: list[float] = []
    strategy: Any = trainer.strategy
    monkeypatch.setattr(type(trainer), "is_deepspeed_enabled", True)
    strategy.propagate_args = lambda args, **_: told.append(args.learning_rate)
    accelerator = trainer.accelerator
    trainer.train(trial={"learning_rate": 0.5})
    assert told == [0.5, 1e-2]
    assert trainer.accelerator is not accelerator


# -- Optuna ----------------------------------------------------------------------------------------------------------


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True), "seed": 3}


def optuna() -> Any:
    module = pytest.importorskip("optuna")
    module.logging.set_verbosity(module.logging.WARNING)
    return module


@pytest.mark.interop
def test_search_finds_the_best_trial_and_leaves_the_arguments(tmp_path: Path) -> None:
    sampler = optuna().samplers.RandomSampler(seed=0)
    trainer, look = make(tmp_path, eval_strategy="epoch", save_strategy="epoch")
    before = trainer.args.to_dict()
    best = trainer.hyperparameter_search(space, n_trials=3, sampler=sampler)
    assert isinstance(best, BestRun)
    assert best.run_summary is None
    assert trainer.args.to_dict() == before
    rates = [run["lr"] for run in look.runs]
    assert len(set(rates)) == 3
    assert best.hyperparameters == {"learning_rate": rates[int(best.run_id)]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0", "run-1", "run-2"]
    states = [json.loads((tmp_path / f"run-{i}/checkpoint-6/trainer_state.json").read_text()) for i in range(3)]
    losses = [state["log_history"][-1]["eval_loss"] for state in states]
    assert best.objective == min(losses) == losses[int(best.run_id)]
    assert [state["trial_name"] for state in states] == ["run-0", "run-1", "run-2"]
    assert states[1]["trial_params"] == {"learning_rate": rates[1], "seed": 3}
    assert len({run["optimizer"] for run in look.runs}) >= 2
    assert look.runs[0]["weight"] == look.runs[1]["weight"]


@pytest.mark.interop
def test_trial_is_the_plain_run_with_its_values(tmp_path: Path) -> None:
    optuna()
    trainer, _ = make(tmp_path)
    best = trainer.hyperparameter_search(space, n_trials=1, backend="optuna")
    plain, _ = make(tmp_path, seed=3, learning_rate=best.hyperparameters["learning_rate"])  # type: ignore[union-attr]
    plain.train()
    assert best.objective == plain.evaluate()["eval_loss"]  # type: ignore[union-attr]


@pytest.mark.interop
def test_default_space_and_default_number_of_trials(tmp_path: Path) -> None:
    optuna()
    trainer, look = make(tmp_path, max_steps=1)
    best = trainer.hyperparameter_search()
    assert len(look.runs) == 20
    for run in look.runs:
        params = run["state"][2]
        assert 1e-6 <= params["learning_rate"] <= 1e-4
        assert 1 <= params["num_train_epochs"] <= 5
        assert 1 <= params["seed"] <= 40
        assert params["per_device_train_batch_size"] in (4, 8, 16, 32, 64)
    assert set(best.hyperparameters) == set(params)  # type: ignore[union-attr]


@pytest.mark.interop
def test_several_directions_return_the_runs_that_none_beats(tmp_path: Path) -> None:
    optuna()
    trainer, look = make(tmp_path, eval_strategy="epoch")
    best = trainer.hyperparameter_search(
        space,
        compute_objective=lambda metrics: (trainer.args.learning_rate, -trainer.args.learning_rate),
        n_trials=3,
        direction=["minimize", "minimize"],
    )
    assert isinstance(best, list)
    assert {run.run_id for run in best} == {"0", "1", "2"}
    rates = [run["lr"] for run in look.runs]
    assert all(run.objective == [rates[int(run.run_id)], -rates[int(run.run_id)]] for run in best)


@pytest.mark.interop
def test_maximized_metrics_are_summed(tmp_path: Path) -> None:
    optuna()
    trainer, look = make(
        tmp_path, compute_metrics=lambda _: {"a": trainer.args.learning_rate, "b": 2 * trainer.args.learning_rate}
    )
    best = trainer.hyperparameter_search(space, n_trials=3, direction="maximize")
    assert best.objective == pytest.approx(3 * max(run["lr"] for run in look.runs))  # type: ignore[union-attr]


@pytest.mark.interop
def test_pruner_ends_trials_cleanly(tmp_path: Path) -> None:
    module = optuna()
    pruner = module.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=3)
    trainer, look = make(tmp_path, eval_strategy="steps", eval_steps=2)
    steps: list[int] = []

    trainer.add_callback(at("on_train_end", lambda args, state, control, **kwargs: steps.append(state.global_step)))
    storage = f"sqlite:///{tmp_path}/study.db"
    with pytest.raises(ConfigError, match=r"the best of 2 trials.*were pruned"):
        trainer.hyperparameter_search(space, n_trials=2, pruner=pruner, storage=storage, study_name="s")
    study = module.load_study(study_name="s", storage=storage)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "PRUNED"]
    assert list(study.trials[0].intermediate_values) == [2, 4]
    assert steps == [4, 4]
    assert look.ended == 2
    assert not trainer.is_in_train
    # The study goes on where it was, and trials that are not pruned end.
    again = trainer.hyperparameter_search(space, n_trials=1, storage=storage, study_name="s", load_if_exists=True)
    assert again.run_id == "2"  # type: ignore[union-attr]


@pytest.mark.interop
def test_objective_is_that_of_the_model_the_trial_ends_with(tmp_path: Path) -> None:
    optuna()
    trainer, _ = make(tmp_path, eval_strategy="steps", eval_steps=4)
    asked: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        asked.append(metrics["eval_loss"])
        return metrics["eval_loss"]

    best = trainer.hyperparameter_search(space, objective, n_trials=1)
    assert len(asked) == 2  # at step 4, and at the end: step 6
    assert best.objective == asked[1] == trainer.evaluate()["eval_loss"]  # type: ignore[union-attr]


@pytest.mark.interop
def test_hp_name_names_trial_and_folder(tmp_path: Path) -> None:
    optuna()
    trainer, look = make(tmp_path, save_strategy="epoch")
    trainer.hyperparameter_search(space, n_trials=2, hp_name=lambda trial: f"try{trial.number}")
    assert [run["state"][1] for run in look.runs] == ["try0", "try1"]
    assert (tmp_path / "try1/checkpoint-6").is_dir()
    with pytest.raises(ConfigError, match="without slashes"):
        trainer.hyperparameter_search(space, n_trials=1, hp_name=lambda trial: "../x")


@pytest.mark.interop
def test_best_model_of_a_trial_is_its_own(tmp_path: Path) -> None:
    optuna()
    trainer, _ = make(tmp_path, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
    best = trainer.hyperparameter_search(space, n_trials=2)
    assert str(trainer.state.best_model_checkpoint) == str(tmp_path / "run-1/checkpoint-6")
    assert math.isfinite(best.objective)  # type: ignore[union-attr,arg-type]


@pytest.mark.interop
def test_architecture_may_depend_on_the_trial(tmp_path: Path) -> None:
    optuna()

    class Sized(Net):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    sizes: list[int] = []

    def model_init(trial: Any) -> nn.Module:
        sizes.append(5 if trial is None else trial.suggest_int("hidden", 2, 9))
        return Sized(sizes[-1])

    trainer, _ = make(tmp_path, model_init=model_init)
    best = trainer.hyperparameter_search(space, n_trials=2)
    assert trainer.model.layers[0].out_features == sizes[-1]
    assert best.hyperparameters["hidden"] in sizes[1:]  # type: ignore[union-attr]


@pytest.mark.interop
def test_trial_of_a_study_of_ones_own(tmp_path: Path) -> None:
    module = optuna()
    trainer, look = make(tmp_path, eval_strategy="epoch")

    def objective(trial: Any) -> float:
        trial.suggest_float("learning_rate", 1e-4, 1e-2)
        return trainer.train(trial=trial).training_loss

    study = module.create_study()
    study.optimize(objective, n_trials=2)
    assert [run["lr"] for run in look.runs] == [trial.params["learning_rate"] for trial in study.trials]
    assert [run["state"][1] for run in look.runs] == ["run-0", "run-1"]
    assert [list(trial.intermediate_values) for trial in study.trials] == [[6], [6]]


@pytest.mark.interop
def test_trial_that_suggested_nothing_takes_the_default_space(tmp_path: Path) -> None:
    module = optuna()
    trainer, look = make(tmp_path, max_steps=1)
    trainer.train(trial=module.create_study().ask())
    assert set(look.runs[0]["state"][2]) >= {"learning_rate", "seed"}


@pytest.mark.interop
def test_sets_with_a_cadence_are_compared_when_all_are_there(tmp_path: Path) -> None:
    optuna()
    sets = {"a": make_rows(4), "b": EvalSet(make_rows(5), every=6)}
    trainer, _ = make(tmp_path, eval_dataset=sets, eval_strategy="steps", eval_steps=2)
    seen: list[set[str]] = []

    def objective(metrics: dict[str, float]) -> float:
        seen.append({name for name in metrics if name.endswith("loss")})
        return default_compute_objective(metrics)

    trainer.hyperparameter_search(space, objective, n_trials=1)
    assert seen == [{"eval_a_loss", "eval_b_loss"}]


@pytest.mark.interop
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_jobs": 2}, "one training at a time"),
        ({"studyname": "x"}, "Did you mean 'study_name'"),
        ({"directions": ["minimize"]}, r"direction=\[...\]"),
        ({"direction": "down"}, "neither 'minimize' nor 'maximize'"),
        ({"hp_space": lambda trial: None}, "returned a NoneType"),
        ({"compute_objective": lambda metrics: [1.0, 2.0]}, "2 values for 1 directions"),
        ({"hp_space": lambda trial: {"lr": 1.0}}, "no setting of that name"),
    ],
)
def test_search_that_cannot_work_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    optuna()
    trainer, _ = make(tmp_path)
    before = trainer.args.to_dict()
    with pytest.raises(ConfigError, match=message):
        trainer.hyperparameter_search(**{"hp_space": space, "n_trials": 1, **options})
    assert trainer.args.to_dict() == before


@pytest.mark.interop
def test_options_reach_optuna(tmp_path: Path) -> None:
    optuna()
    trainer, look = make(tmp_path)
    seen: list[int] = []

    def stop(study: Any, trial: Any) -> None:
        seen.append(trial.number)
        study.stop()

    trainer.hyperparameter_search(
        space, n_trials=50, timeout=600.0, n_jobs=1, gc_after_trial=True, callbacks=[stop], study_name="mine"
    )
    assert seen == [0]
    assert len(look.runs) == 1
