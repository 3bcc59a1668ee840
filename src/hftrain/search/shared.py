"""One search over several processes: the main one calls the backend and broadcasts its answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.log import get_logger
from hftrain.search.config import BestRun
from hftrain.strategies.base import Strategy

logger = get_logger(__name__)

Result = BestRun | list[BestRun]


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
    """Run a search on the main process and each of its trials on all. Collective.

    Args:
        run: Runs the search with the given trial function.
        attempt: Trains with a trial. Collective.
    """
    if not group.is_main:
        return _follow(attempt, group)

    def lead(trial: Any) -> Any:
        group.broadcast_object({"number": trial.number})
        return attempt(SharedTrial(trial, number=trial.number, group=group))

    try:
        result = run(lead)
    except BaseException as error:
        group.broadcast_object({"error": f"{type(error).__name__}: {error}"})
        raise
    is_one = isinstance(result, BestRun)
    group.broadcast_object({"is_one": is_one, "best": [result] if is_one else result})
    return result


def _follow(attempt: Callable[[Any], Any], group: Strategy) -> Result:
    failure: Exception | None = None
    while "number" in (told := group.broadcast_object(None)):
        failure = None
        try:
            attempt(SharedTrial(None, number=told["number"], group=group))
        except Exception as error:
            # The main process raised it too (for a pruned trial, say) and decides whether the search continues.
            failure = error
    if "error" in told:
        raise StrategyError(
            "Cannot run hyperparameter_search().", f"The main process ended it: {told['error']}", ""
        ) from failure
    best = [BestRun(*each) for each in told["best"]]
    return best[0] if told["is_one"] else best
