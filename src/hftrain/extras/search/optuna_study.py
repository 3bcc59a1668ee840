"""Search with Optuna."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hftrain.core.errors import ConfigError, StrategyError, suggest
from hftrain.core.types import BestRun
from hftrain.extras.search.config import Attempt, SearchConfig
from hftrain.strategies.base import Strategy

Result = BestRun | list[BestRun]

# The arguments that hftrain sets itself.
_SET_BY_HFTRAIN = {"direction", "directions", "func", "self", "n_trials"}


def search_with_optuna(config: SearchConfig, attempt: Attempt, *, group: Strategy) -> Result:
    """Run a study; with several processes, only the main one calls Optuna. Collective.

    Args:
        config: Its options are passed to `optuna.create_study` and `Study.optimize`.

    Returns:
        The best trial, or the Pareto front for several directions.
    """
    import optuna

    of_study, of_optimize = _parameter_names(optuna.create_study), _parameter_names(optuna.Study.optimize)
    _check_options(config.options, of_study | of_optimize)
    study_options = {name: value for name, value in config.options.items() if name in of_study}
    optimize_options = {name: value for name, value in config.options.items() if name in of_optimize}
    is_single = len(config.directions) == 1

    def attempt_trial(trial: Any) -> Any:
        report = partial(report_to_optuna, trial) if is_single else None
        return attempt(trial, space=config.space, report=report)

    def run(objective: Any) -> Result:
        directions: list[Any] = list(config.directions)
        study = optuna.create_study(**study_options, directions=directions)
        study.optimize(objective, n_trials=config.num_trials, **optimize_options)
        best_trials = study.best_trials
        if not best_trials:
            raise ConfigError(
                f"Cannot determine the best of {len(study.trials)} trials.",
                "None completed with a number: they were pruned, failed, or returned NaN.",
                "Let the pruner wait for more steps, or narrow hp_space.",
            )
        if is_single:
            return BestRun(str(best_trials[0].number), best_trials[0].values[0], best_trials[0].params)
        return [BestRun(str(trial.number), list(trial.values), trial.params) for trial in best_trials]

    if group.world_size == 1:
        return run(attempt_trial)
    return search_together(run, attempt_trial, group=group)


def report_to_optuna(trial: Any, values: Any, *, step: int, folder: str = "") -> None:
    """Report an intermediate value to Optuna; raise `TrialPruned` if the pruner ends the trial."""
    import optuna

    trial.report(values, step)
    if trial.should_prune():
        raise optuna.TrialPruned(f"Pruned at step {step} with {values}.")


def _parameter_names(function: Any) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name not in _SET_BY_HFTRAIN}


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


# -- several processes: the main one calls Optuna and broadcasts its answers -----------------------------------------


class SharedTrial:
    """An Optuna trial that returns the same values on every process.

    `suggest_*` and `should_prune` are collective: all processes call them in the same order. Values are sent as JSON.

    Args:
        trial: The Optuna trial on the main process; None on the others.
    """

    def __init__(self, trial: Any, *, number: int, group: Strategy) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self._trial = trial
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("suggest_"):
            return partial(self._suggest, name)
        raise AttributeError(f"A trial that several processes share has no {name!r}.")

    def _suggest(self, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        self.params[name] = self._ask(method, name, *args, **kwargs)
        return self.params[name]

    def should_prune(self) -> bool:
        """Return whether the trial should end now. Collective."""
        return bool(self._ask("should_prune"))

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value from the main process."""
        if self._trial is not None:
            self._trial.report(value, step)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Attach an attribute to the trial from the main process."""
        if self._trial is not None:
            self._trial.set_user_attr(key, value)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        answer: dict[str, Any] = {}
        if self._trial is not None:
            try:
                answer = {"value": getattr(self._trial, method)(*args, **kwargs)}
            except Exception as error:
                # The other processes are waiting for the broadcast.
                answer = {"error": f"{type(error).__name__}: {error}"}
        answer = self._group.broadcast_object(answer)
        if "error" in answer:
            raise ConfigError(
                f"Cannot call trial.{method}({', '.join(map(repr, args))}).",
                answer["error"],
                "Correct hp_space or model_init.",
            )
        return answer["value"]


def search_together(
    run: Callable[[Callable[[Any], Any]], Result], attempt: Callable[[Any], Any], *, group: Strategy
) -> Result:
    """Run a search on the main process and each of its trials, with `attempt`, on all. Collective."""
    if not group.is_main:
        return _join_trials(attempt, group)

    def lead(trial: Any) -> Any:
        group.broadcast_object({"number": trial.number})
        return attempt(SharedTrial(trial, number=trial.number, group=group))

    try:
        result = run(lead)
    except BaseException as error:
        group.broadcast_object({"error": f"{type(error).__name__}: {error}"})
        raise
    is_single = isinstance(result, BestRun)
    group.broadcast_object({"is_one": is_single, "best": [result] if is_single else result})
    return result


def _join_trials(attempt: Callable[[Any], Any], group: Strategy) -> Result:
    """Train each trial that the main process announces, until it announces the result."""
    failure: Exception | None = None
    while "number" in (message := group.broadcast_object(None)):
        failure = None
        try:
            attempt(SharedTrial(None, number=message["number"], group=group))
        except Exception as error:
            # The main process raised it too (for a pruned trial, say) and decides whether the search continues.
            failure = error
    if "error" in message:
        raise StrategyError(
            "Cannot run hyperparameter_search().", f"The main process ended it: {message['error']}", ""
        ) from failure
    runs = [BestRun(*fields) for fields in message["best"]]
    return runs[0] if message["is_one"] else runs
