"""Search with a Weights & Biases sweep."""

from __future__ import annotations

from typing import Any

from hftrain.core.errors import ConfigError, check_known
from hftrain.core.types import BestRun
from hftrain.extras.search.config import Attempt, SearchConfig

_OPTIONS = ("sweep_id", "project", "entity", "name", "metric")


def search_with_wandb(config: SearchConfig, attempt: Attempt) -> BestRun:
    """Create or join a sweep and run its agent in this process.

    Args:
        config: Its options are `sweep_id` (an existing sweep to join), `project`, `entity`, `name` (of the sweep) and
            `metric` (the name under which the objective is logged).

    Returns:
        The best of the trials that ran in this process.
    """
    import wandb

    options = dict(config.options)
    for option in options:
        check_known(option, _OPTIONS, f"Cannot use hyperparameter_search({option}=...).", "A sweep has no such option.")
    metric, direction = options.get("metric") or "objective", config.directions[0]
    project = {name: options.get(name) for name in ("project", "entity")}
    sweep_id = options.get("sweep_id")
    if sweep_id is None:
        sweep = {**config.space(None), "metric": {"name": metric, "goal": direction}}
        if options.get("name") is not None:
            sweep["name"] = options["name"]
        sweep_id = wandb.sweep(sweep, **project)
    runs: list[BestRun] = []
    failures: list[Exception] = []

    def run_trial() -> None:
        run: Any = wandb.init()

        def report(values: Any, *, step: int, folder: str) -> None:
            run.log({metric: values})

        try:
            values = dict(run.config)
            objective = attempt(values, run_id=run.id, report=report)
            run.log({metric: objective})
            runs.append(BestRun(run.id, objective, values))
        except Exception as error:
            # The agent swallows the exception.
            failures.append(error)
            raise
        finally:
            run.finish()

    wandb.agent(sweep_id, function=run_trial, count=config.num_trials, **project)
    if not runs:
        raise ConfigError(
            "Cannot determine the best trial of the sweep.", "No trial completed.", "Look at the sweep's log."
        ) from (failures[-1] if failures else None)
    return (max if direction == "maximize" else min)(runs, key=lambda run: run.objective)
