"""A search's settings, result and choice of backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hftrain.core.errors import ConfigError, MissingDependencyError, check_known
from hftrain.core.extras import is_available, require
from hftrain.core.types import HPSearchBackend

DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """The settings of a search.

    Args:
        space: Takes the trial and returns values; takes None and returns the space for backends that need it whole.
        num_trials: The number of trials; None if something else ends the search.
        scope: Which of a trial's results Ray Tune compares.
    """

    space: Callable[[Any], Any]
    num_trials: int | None
    directions: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "last"


# Reports the objective to a backend, after `step` and with the `folder` of the checkpoints; raises to end the trial.
Report = Callable[..., None]
# Trains and evaluates once with a trial and options of `trial_settings`, and returns the objective or objectives.
Attempt = Callable[..., Any]

# In the order of preference.
_REQUIREMENTS = {
    HPSearchBackend.OPTUNA: ("optuna>=4", "search"),
    HPSearchBackend.RAY: ("ray[tune]>=2.9", None),
    HPSearchBackend.WANDB: ("wandb>=0.15", None),
}


def choose_backend(name: str | HPSearchBackend | None) -> HPSearchBackend:
    """Return the requested backend, or the first installed one of optuna, ray and wandb."""
    if name is None:
        for backend, (package, _) in _REQUIREMENTS.items():
            if is_available(package):
                return backend
        packages = ", ".join(package for package, _ in _REQUIREMENTS.values())
        raise MissingDependencyError(
            "Cannot run hyperparameter_search().",
            f"No backend is installed: {packages}.",
            "Run: pip install 'hftrain[search]' (for optuna), or install one of the others.",
        )
    names = [backend_known.value for backend_known in HPSearchBackend]
    check_known(name, names, f"Cannot use backend={name!r}.", "No search backend has that name.")
    backend = HPSearchBackend(name)
    if backend is HPSearchBackend.SIGOPT:
        raise ConfigError(
            "Cannot use backend='sigopt'.",
            "Every trial of SigOpt's package comes from api.sigopt.com, a service that has ended.",
            "Use backend='optuna', whose TPE and Gaussian process samplers do what SigOpt's service did.",
        )
    requirement, extra = _REQUIREMENTS[backend]
    require(requirement, feature=f"backend={backend.value!r}", extra=extra)
    return backend


def check_directions(direction: Any, backend: HPSearchBackend) -> tuple[str, ...]:
    """Return the direction of each objective."""
    directions = tuple(direction) if isinstance(direction, (list, tuple)) else (direction,)
    if not directions or any(name not in DIRECTIONS for name in directions):
        raise ConfigError(
            "Cannot use this direction.",
            "It is neither 'minimize' nor 'maximize', nor a list of these.",
            "Use 'minimize' for a loss and 'maximize' for metrics that grow when the model gets better.",
            direction=direction,
        )
    if len(directions) > 1 and backend is not HPSearchBackend.OPTUNA:
        raise ConfigError(
            f"Cannot use {len(directions)} directions.",
            f"backend={backend.value!r} searches for one objective.",
            "Use backend='optuna', or let compute_objective return one number.",
            direction=direction,
        )
    return directions
