"""The default objective and the spaces that need no package."""

from __future__ import annotations

from typing import Any

import pytest

from hftrain import ConfigError
from hftrain.search.defaults import default_compute_objective, default_hp_space_wandb


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


def test_space_of_a_sweep() -> None:
    space = default_hp_space_wandb(None)["parameters"]
    assert space["learning_rate"] == {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-4}
    assert space["per_device_train_batch_size"]["values"] == [4, 8, 16, 32, 64]
