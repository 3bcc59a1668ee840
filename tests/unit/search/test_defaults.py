"""The default objective and the spaces that need no package."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hftrain import ConfigError
from hftrain.extras.search.defaults import (
    default_compute_objective,
    default_hp_space_optuna,
    default_hp_space_ray,
    default_hp_space_wandb,
)


@pytest.mark.parametrize(
    ("metrics", "objective"),
    [
        ({"eval_loss": 0.5, "epoch": 1.0, "eval_runtime": 3.0, "eval_samples_per_second": 4.0}, 0.5),
        ({"eval_loss": 0.5, "eval_model_preparation_time": 0.1, "eval_mem_cpu_alloc_delta": 5}, 0.5),
        ({"eval_loss": 0.5, "eval_accuracy": 0.25, "eval_f1": 0.5, "epoch": 2.0}, 0.75),
        ({"eval_a_loss": 0.5, "eval_b_loss": 0.25}, 0.75),
    ],
)
def test_objective_is_the_loss_or_the_sum_of_metrics(metrics: dict[str, float], objective: float) -> None:
    before = dict(metrics)
    assert default_compute_objective(metrics) == objective
    assert metrics == before


@pytest.mark.parametrize("metrics", [{"epoch": 1.0}, {"eval_loss": 0.5, "eval_confusion": [[1, 0], [0, 1]]}])
def test_metrics_without_a_number_are_refused(metrics: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Pass compute_objective"):
        default_compute_objective(metrics)


class Calls:
    """Return each method's name with its arguments."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: (name, *args, *kwargs.items())


SIZES = [4, 8, 16, 32, 64]


def test_space_of_optuna() -> None:
    assert default_hp_space_optuna(Calls()) == {
        "learning_rate": ("suggest_float", "learning_rate", 1e-6, 1e-4, ("log", True)),
        "num_train_epochs": ("suggest_int", "num_train_epochs", 1, 5),
        "seed": ("suggest_int", "seed", 1, 40),
        "per_device_train_batch_size": ("suggest_categorical", "per_device_train_batch_size", SIZES),
    }


def test_space_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's upper bounds of integers are exclusive."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(tune=Calls()))
    assert default_hp_space_ray(None) == {
        "learning_rate": ("loguniform", 1e-6, 1e-4),
        "num_train_epochs": ("randint", 1, 6),
        "seed": ("randint", 1, 41),
        "per_device_train_batch_size": ("choice", SIZES),
    }


def test_space_of_a_sweep() -> None:
    assert default_hp_space_wandb(None)["parameters"] == {
        "learning_rate": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-4},
        "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 5},
        "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
        "per_device_train_batch_size": {"values": SIZES},
    }
