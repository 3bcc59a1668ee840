"""Search with Optuna."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from hftrain.core.errors import ConfigError, suggest
from hftrain.search.config import Attempt, BestRun, SearchConfig
from hftrain.search.shared import Result, search_together
from hftrain.strategies.base import Strategy

# The arguments that hftrain sets itself.
_OURS = {"direction", "directions", "func", "self", "n_trials"}


def search_with_optuna(config: SearchConfig, attempt: Attempt, *, group: Strategy) -> Result:
    """Run a study; with several processes, only the main one calls Optuna. Collective.

    Args:
        config: Its options are passed to `optuna.create_study` and `Study.optimize`.

    Returns:
        The best trial, or the Pareto front for several directions.
    """
    import optuna

    known = _known(optuna.create_study), _known(optuna.Study.optimize)
    _check_options(config.options, known[0] | known[1])
    creating, running = ({name: value for name, value in config.options.items() if name in each} for each in known)
    has_one = len(config.directions) == 1

    def attempt_trial(trial: Any) -> Any:
        report = partial(report_to_optuna, trial) if has_one else None
        return attempt(trial, space=config.space, report=report)

    def run(objective: Any) -> Result:
        study = optuna.create_study(**creating, directions=list(config.directions))
        study.optimize(objective, n_trials=config.num_trials, **running)
        best = study.best_trials
        if not best:
            raise ConfigError(
                f"Cannot determine the best of {len(study.trials)} trials.",
                "None completed with a number: they were pruned, failed, or returned NaN.",
                "Let the pruner wait for more steps, or narrow hp_space.",
            )
        if has_one:
            return BestRun(str(best[0].number), best[0].value, best[0].params)
        return [BestRun(str(trial.number), list(trial.values), trial.params) for trial in best]

    if group.world_size == 1:
        return run(attempt_trial)
    return search_together(run, attempt_trial, group=group)


def report_to_optuna(trial: Any, values: Any, *, step: int, folder: str = "") -> None:
    """Report an intermediate value to Optuna; raise `TrialPruned` if the pruner ends the trial."""
    import optuna

    trial.report(values, step)
    if trial.should_prune():
        raise optuna.TrialPruned(f"Pruned at step {step} with {values}.")


def _known(function: Any) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name not in _OURS}


def _check_options(options: Mapping[str, Any], known: set[str]) -> None:
    for name in options:
        if name not in known:
            raise ConfigError(
                f"Cannot use hyperparameter_search({name}=...).",
                "Neither optuna.create_study nor Study.optimize takes it here.",
                "Pass direction=[...]." if name == "directions" else suggest(name, known),
            )
    if options.get("n_jobs", 1) != 1:
        raise ConfigError(
            "Cannot use hyperparameter_search(n_jobs=...).",
            "One Trainer runs one training at a time, and the threads of n_jobs would share it.",
            "Start the script several times with one storage= and study_name=, and load_if_exists=True.",
            n_jobs=options["n_jobs"],
        )
