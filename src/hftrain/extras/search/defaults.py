"""The documented default spaces, and the documented default objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once

_BATCH_SIZES = [4, 8, 16, 32, 64]
# Endings and names of reported values that are neither losses nor metrics.
_NOT_METRICS = ("_runtime", "_per_second", "_time")
_COUNTS = ("epoch", "num_input_tokens_seen", "total_flos")


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Return the default Optuna space: learning rate, epochs, seed, batch size. Source: the documented function."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", _BATCH_SIZES),
    }


def default_hp_space_ray(trial: Any) -> dict[str, Any]:
    """Return the same space as Ray Tune's samplers. Source: the documented `default_hp_space_ray`."""
    from ray import tune

    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.randint(1, 6),
        "seed": tune.randint(1, 41),
        "per_device_train_batch_size": tune.choice(_BATCH_SIZES),
    }


def default_hp_space_wandb(trial: Any) -> dict[str, Any]:
    """Return the same space as a sweep's configuration. Source: the documented `default_hp_space_wandb`."""
    return {
        "method": "random",
        "parameters": {
            "learning_rate": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-4},
            "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 5},
            "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
            "per_device_train_batch_size": {"values": _BATCH_SIZES},
        },
    }


def default_compute_objective(metrics: Mapping[str, Any]) -> float:
    """Return the sum of the evaluation's metrics, or its loss if it reports no metric.

    Losses, speeds, memory and the epoch are not metrics. The losses of several evaluation sets are summed.

    Args:
        metrics: The result of `evaluate`.

    Raises:
        ConfigError: There is neither a loss nor a metric, or a metric is not a number.

    Source: the documented `default_compute_objective`.

    Example:
        >>> default_compute_objective({"eval_loss": 0.5, "eval_runtime": 1.2, "epoch": 3.0})
        0.5
        >>> default_compute_objective({"eval_loss": 0.5, "eval_f1": 0.75, "eval_precision": 0.5, "epoch": 3.0})
        1.25
    """
    losses, scores = _split_losses_and_scores(metrics)
    summands = scores or losses
    if not summands or not all(isinstance(value, (int, float)) for value in summands.values()):
        raise ConfigError(
            "Cannot compute an objective from the evaluation's metrics.",
            "A metric is not a number." if summands else "It reported neither a loss nor a metric.",
            "Pass compute_objective, which gets the metrics and returns a number.",
            metrics=sorted(metrics),
        )
    return float(sum(summands.values()))


def minimized_objective(metrics: Mapping[str, Any], *, is_task: bool) -> float:
    """Return the default objective of a search that minimizes, and warn if there are metrics, most of which grow.

    Args:
        is_task: The metrics are a task's own: the objective is its loss, not their sum.

    Raises:
        ConfigError: As `default_compute_objective`; or a task reports metrics without a loss.
    """
    losses, scores = _split_losses_and_scores(metrics)
    remedy = "pass direction='maximize' for the sum of the metrics, or compute_objective."
    if is_task and scores:
        if not losses:
            raise ConfigError(
                "Cannot compute an objective from the evaluation's metrics.",
                f"The task reports no loss, and its metrics would be minimized: {', '.join(scores)}.",
                f"P{remedy[1:]}",
            )
        losses = {"eval_loss": losses["eval_loss"]} if "eval_loss" in losses else losses
        minimized, ignored = " + ".join(losses), ", ".join(scores)
        warn_once(f"hyperparameter_search() minimizes {minimized}, not {ignored}. For another objective, {remedy}")
        return default_compute_objective(losses)
    if scores:
        warn_once(f"hyperparameter_search() minimizes {' + '.join(scores)}. If more is better, {remedy}")
    return default_compute_objective(metrics)


def _split_losses_and_scores(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    metrics_only = {
        name: value
        for name, value in metrics.items()
        if name not in _COUNTS and not name.endswith(_NOT_METRICS) and "_mem_" not in name
    }
    losses = {name: value for name, value in metrics_only.items() if name.endswith("loss")}
    return losses, {name: value for name, value in metrics_only.items() if name not in losses}
