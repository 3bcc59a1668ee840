"""A search over two processes: the main one asks Optuna, the other makes the same trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.distributed import launch
from support.tiny import Net, make_rows, make_trainer
from torch import nn

from hftrain import ConfigError, Trainer, TrainerCallback

pytestmark = [pytest.mark.distributed, pytest.mark.interop]


class Sized(Net):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
    }


def make(**options: Any) -> tuple[Trainer, list[Any]]:
    runs: list[Any] = []

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            size = kwargs["model"].layers[0].out_features
            runs.append([args.learning_rate, args.per_device_train_batch_size, size, state.trial_name])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            runs[-1].append(state.global_step)

    trainer = make_trainer(
        Path("out"), train_dataset=make_rows(16),
        model_init=lambda trial: Sized(5 if trial is None else trial.suggest_int("hidden", 2, 9)),
        eval_dataset=make_rows(8), callbacks=[Look], strategy="ddp", num_train_epochs=1, save_strategy="epoch",
        **options,
    )  # fmt: skip
    return trainer, runs


def run_search() -> Any:
    trainer, runs = make(eval_strategy="epoch")
    before = trainer.args.to_dict()
    best = trainer.hyperparameter_search(space, n_trials=3, backend="optuna")
    weights = [w.sum().item() for w in trainer.model.parameters()]
    return [list(best), runs, trainer.args.to_dict() == before, weights]


def run_pruned() -> Any:
    import optuna

    trainer, runs = make(eval_strategy="steps", eval_steps=1)
    pruner = optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=1)
    try:
        trainer.hyperparameter_search(space, n_trials=2, pruner=pruner)
    except Exception as error:
        return [type(error).__name__, str(error), runs]


def run_failing() -> Any:
    trainer, _ = make()
    told = []
    for options in (
        {"compute_objective": lambda metrics: [1.0, 2.0]},
        {"hp_space": lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 2.0, 1.0)}},
        {"backend": "wandb"},
        {"catch": (ConfigError,), "compute_objective": lambda metrics: [1.0, 2.0]},
    ):
        try:
            trainer.hyperparameter_search(**{"hp_space": space, "n_trials": 1, "backend": "optuna", **options})
        except Exception as error:
            told.append([type(error).__name__, str(error)])
    return told


def test_two_processes_make_the_same_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    run = launch(run_search, tmp_path, forks=True)
    assert run.returncode == 0, run.output
    assert run.results[0] == run.results[1]
    best, runs, is_restored, _ = run.results[0]
    assert is_restored
    assert [each[3] for each in runs] == ["run-0", "run-1", "run-2"]
    chosen = runs[int(best[0])]
    names = ("learning_rate", "per_device_train_batch_size", "hidden")
    assert best[2] == dict(zip(names, chosen[:3], strict=True))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run-0", "run-1", "run-2"]


def test_two_processes_prune_together(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    run = launch(run_pruned, tmp_path, forks=True)
    assert run.returncode == 0, run.output
    (main, text, runs), (other, told, others) = run.results
    assert (main, other) == ("ConfigError", "StrategyError")
    assert "Cannot determine the best of 2 trials" in text
    assert text in told
    assert runs == others
    assert [each[4] for each in runs] == [1, 1]


def test_two_processes_hear_of_a_failure(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    run = launch(run_failing, tmp_path, forks=True)
    assert run.returncode == 0, run.output
    main, other = run.results
    assert [each[0] for each in main] == ["ConfigError", "ConfigError", main[2][0], "ConfigError"]
    assert [each[0] for each in other] == ["StrategyError", "StrategyError", main[2][0], "StrategyError"]
    assert "2 values for 1 directions" in main[0][1]
    assert "trial.suggest_float" in main[1][1]
    assert "Cannot determine the best of 1 trials" in main[3][1]
