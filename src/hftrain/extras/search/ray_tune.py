"""Search with Ray Tune: each trial runs in a Ray process, with a copy of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.rotation import by_commit
from hftrain.core.errors import ConfigError
from hftrain.core.preserve import preserved_signals
from hftrain.core.types import BestRun
from hftrain.extras.search.config import Attempt, SearchConfig

OBJECTIVE = "objective"


def search_with_ray(config: SearchConfig, attempt: Attempt, *, evaluates: bool) -> BestRun:
    """Run `ray.tune.run`.

    Args:
        config: Its options are passed to `ray.tune.run`; `scope` selects which of a trial's results are compared.
        attempt: Trains with a dict of values; pickled for each trial.

    Returns:
        The best trial, with Ray's analysis as `run_summary`.
    """
    from ray import tune

    options = dict(config.options)
    if options.get("scheduler") is not None and not evaluates:
        raise ConfigError(
            f"Cannot use scheduler={type(options['scheduler']).__name__}(...).",
            "It decides by a trial's intermediate results, and no evaluation runs while training.",
            "Set eval_strategy='steps' or 'epoch', or leave the scheduler out.",
        )
    options.setdefault("resources_per_trial", {"cpu": 1, **({"gpu": 1} if torch.cuda.is_available() else {})})
    mode, scope = config.directions[0][:3], config.scope
    trainable = tune.with_parameters(run_trial, attempt=attempt)
    with preserved_signals():
        analysis = tune.run(trainable, config=config.space(None), num_samples=config.num_trials or 1, **options)
    best = analysis.get_best_trial(OBJECTIVE, mode, scope=scope)
    if best is None:
        raise ConfigError("Cannot determine the best trial.", "No trial reported a number.", "Look into Ray's results.")
    kind = f"{scope}-avg" if scope.startswith("last-") else scope if scope in ("last", "avg") else mode
    value = best.metric_analysis[OBJECTIVE][kind]
    return BestRun(best.trial_id, value, best.config, analysis)


def run_trial(config: dict[str, Any], *, attempt: Attempt) -> None:
    """Run one trial in a Ray process.

    A trial that Ray restarts resumes from the last checkpoint it reported.
    """
    from ray import tune

    reported: list[Any] = []

    def report(values: Any, *, step: int, folder: str) -> None:
        reported.append(values)
        saved = by_commit(Path(folder))
        checkpoint = tune.Checkpoint.from_directory(str(saved[-1])) if saved else None
        tune.report({OBJECTIVE: values, "step": step}, checkpoint=checkpoint)

    run_id = tune.get_context().get_trial_id()
    previous = tune.get_checkpoint()
    if previous is None:
        values = attempt(config, run_id=run_id, report=report)
    else:
        with previous.as_directory() as folder:
            values = attempt(config, run_id=run_id, report=report, resume=folder)
    if reported[-1:] != [values]:
        tune.report({OBJECTIVE: values})
