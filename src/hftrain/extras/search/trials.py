"""Hyper-parameter search: setting a trial's values while it runs and reporting its results to the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hftrain.callbacks import CallbackHandler
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.core.preserve import preserved
from hftrain.core.signatures import takes_trial
from hftrain.core.state import TrainerState
from hftrain.core.types import BestRun, HPSearchBackend
from hftrain.extras.search.config import Report, SearchConfig, check_directions, choose_backend
from hftrain.extras.search.defaults import (
    default_compute_objective,
    default_hp_space_optuna,
    default_hp_space_ray,
    default_hp_space_wandb,
    minimized_objective,
)
from hftrain.extras.search.optuna_study import report_to_optuna, search_with_optuna
from hftrain.extras.search.ray_tune import search_with_ray
from hftrain.extras.search.values import apply_hyperparameters
from hftrain.extras.search.wandb_sweep import search_with_wandb
from hftrain.task.model_task import ModelTask
from hftrain.trainer.parts import TrainerParts

logger = get_logger(__name__)

Objective = Callable[[dict[str, float]], Any]

SPACES: dict[HPSearchBackend, Callable[[Any], dict[str, Any]]] = {
    HPSearchBackend.OPTUNA: default_hp_space_optuna,
    HPSearchBackend.RAY: default_hp_space_ray,
    HPSearchBackend.WANDB: default_hp_space_wandb,
}


@dataclass(kw_only=True)
class TrialRun:
    """A running trial.

    Args:
        trial: The trial passed to `model_init` and hooks: the backend's trial, or a dict of values.
        name: Name of the trial and of its folder; None for a plain dict of values.
        report: Called with each evaluation during training; may end the trial.
        values: The objective after the last evaluation; `step` is the step of that evaluation.
    """

    trial: Any
    name: str | None
    params: dict[str, Any]
    compute_objective: Objective
    report: Report | None
    values: Any = None
    step: int | None = None

    def note(self, metrics: Mapping[str, Any], *, step: int, folder: str, events: CallbackHandler) -> None:
        """Compute the objective of an evaluation during training, and report it.

        Args:
            events: Fires `on_train_end` if the report ends the trial, so that trackers close its run.
        """
        self.values, self.step = self.compute_objective(dict(metrics)), step
        if self.report is not None:
            try:
                self.report(self.values, step=step, folder=folder)
            except Exception:
                events.fire("on_train_end")
                raise

    def objectives(self, number: int) -> Any:
        """Return the objective as a number, or several as a list."""
        values = list(self.values) if isinstance(self.values, (list, tuple)) else [self.values]
        if len(values) != number:
            raise ConfigError(
                "Cannot use what compute_objective(metrics) returned.",
                f"It returned {len(values)} values for {number} directions.",
                "Return as many numbers as direction= has entries.",
                values=self.values,
            )
        numbers = [float(value) for value in values]
        return numbers if number > 1 else numbers[0]

    def describe(self, state: TrainerState) -> None:
        """Record the trial in a run's state."""
        state.is_hyper_param_search, state.trial_name = True, self.name
        state.trial_params = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in self.params.items()
        }


def search_trials(
    trainer: Any,
    parts: TrainerParts,
    follow: Callable[[], None],
    *,
    space: Callable[[Any], Any] | None,
    compute_objective: Objective | None,
    num_trials: int,
    direction: str | list[str],
    backend: str | HPSearchBackend | None,
    hp_name: Callable[[Any], str] | None,
    options: Mapping[str, Any],
) -> BestRun | list[BestRun]:
    """Do what the documented `hyperparameter_search` does; collective."""
    _check_search(trainer, parts)
    backend_name = trainer.hp_search_backend = choose_backend(backend)
    try:
        config = SearchConfig(
            space=space or SPACES[backend_name],
            num_trials=num_trials,
            directions=check_directions(direction, backend_name),
            options=options,
            scope=trainer.args.ray_scope or "last",
        )
        default: Objective = default_compute_objective
        if config.directions == ("minimize",):
            default = partial(minimized_objective, is_task=not isinstance(trainer.task, ModelTask))
        attempt = partial(_train_trial, trainer, parts, follow, len(config.directions))
        attempt = partial(attempt, compute_objective=compute_objective or default, hp_name=hp_name)
        # Each trial creates its own, and Ray's processes must not receive these.
        trainer.accelerator = None
        if backend_name is HPSearchBackend.OPTUNA:
            trainer.strategy.launch()
            return search_with_optuna(config, attempt, group=trainer.strategy)
        if trainer.strategy.world_size > 1:
            raise ConfigError(
                f"Cannot use backend={backend_name.value!r} on {trainer.strategy.world_size} processes.",
                "It runs trials in processes that it chooses itself.",
                "Launch one process, or use backend='optuna', whose trials run on all processes together.",
            )
        if backend_name is HPSearchBackend.WANDB:
            return search_with_wandb(config, attempt)
        with _portable(trainer.callback_handler):
            return search_with_ray(config, attempt, evaluates=trainer.args.eval_strategy != "no")
    finally:
        trainer.hp_search_backend = None


def _train_trial(
    trainer: Any,
    parts: TrainerParts,
    follow: Callable[[], None],
    num_objectives: int,
    trial: Any,
    *,
    resume: str | None = None,
    **options: Any,
) -> Any:
    with trial_settings(trainer, parts, follow, trial, **options) as run:
        trainer.train(resume_from_checkpoint=resume, trial=trial)
        if run.step != trainer.state.global_step or trainer.args.load_best_model_at_end:
            # The trial's final model has not been evaluated.
            run.values = run.compute_objective(dict(trainer.evaluate()))
        return run.objectives(num_objectives)


@contextmanager
def trial_settings(
    trainer: Any,
    parts: TrainerParts,
    follow: Callable[[], None],
    trial: Any,
    *,
    space: Callable[[Any], Any] | None = None,
    run_id: str | None = None,
    hp_name: Callable[[Any], str] | None = None,
    compute_objective: Objective | None = None,
    report: Report | None = None,
) -> Iterator[TrialRun]:
    """Let a Trainer train with a trial's values.

    Args:
        space: Returns the values of a trial; None takes the values it has suggested already.
        run_id: The backend's name of the trial; None takes the number of an Optuna trial.
    """
    args, noise, noise_setting = trainer.args, trainer.neftune_noise_alpha, trainer.args.neftune_noise_alpha
    model_init = check_model_init(trainer.model_init, asked="train(trial=...)")
    is_dict = isinstance(trial, Mapping)
    if not is_dict and not hasattr(trial, "suggest_float"):
        raise ConfigError(
            "Cannot run train(trial=...).",
            f"A {type(trial).__name__} is not a trial.",
            "Pass an Optuna trial, or a dict of hyper-parameters.",
        )
    if not is_dict:
        run_id = str(trial.number)
        report = partial(report_to_optuna, trial) if space is None else report
    params = _values(trial, space)
    name = _name(trial, run_id, hp_name)
    compute = compute_objective or default_compute_objective
    try:
        with preserved(args):
            unknown = apply_hyperparameters(args, params, is_for_model=takes_trial(model_init))
            if unknown:
                logger.warning("Only model_init(trial) sees these hyper-parameters, no setting does: %s.", unknown)
            if name is not None:
                args.output_dir = parts.output.below(name)
            if args.neftune_noise_alpha != noise_setting:
                trainer.neftune_noise_alpha = args.neftune_noise_alpha
            run = TrialRun(trial=trial, name=name, params=params, compute_objective=compute, report=report)
            parts.trial_run, parts.hooks.trial, trainer.hp_name = run, trial, hp_name
            follow()
            yield run
    finally:
        parts.trial_run = parts.hooks.trial = None
        trainer.neftune_noise_alpha = noise
        follow()


def _check_search(trainer: Any, parts: TrainerParts) -> None:
    check_model_init(trainer.model_init, asked="hyperparameter_search()")
    if trainer.fast_dev_run:
        raise ConfigError(
            "Cannot run hyperparameter_search().",
            "With fast_dev_run nothing is trained that an objective could be computed of.",
            "Rehearse with train(trial={...}), and search without fast_dev_run.",
            fast_dev_run=trainer.fast_dev_run,
        )
    if trainer.eval_dataset is None and not parts.hooks.is_overridden("get_eval_dataloader", "evaluate"):
        raise ConfigError(
            "Cannot run hyperparameter_search().",
            "A trial's objective comes from an evaluation, and there is no eval_dataset.",
            "Pass eval_dataset= to the Trainer.",
        )


def check_model_init(model_init: Callable[..., Any] | None, *, asked: str) -> Callable[..., Any]:
    """Return `model_init`; raise if it is missing."""
    if model_init is None:
        raise ConfigError(
            f"{asked} was called.",
            "Each trial trains a new model, and there is no model_init to make one.",
            "Pass model_init=, a function that returns the model, instead of model=.",
        )
    return model_init


def _values(trial: Any, space: Callable[[Any], Any] | None) -> dict[str, Any]:
    if isinstance(trial, Mapping):
        return dict(trial)
    if space is None:
        return dict(trial.params) or default_hp_space_optuna(trial)
    values = space(trial)
    if not isinstance(values, Mapping):
        raise ConfigError(
            "Cannot use what hp_space(trial) returned.",
            f"It returned a {type(values).__name__}.",
            "Return a dict: the names of settings, and what trial.suggest_* gave for each.",
        )
    return dict(values)


def _name(trial: Any, run_id: str | None, hp_name: Callable[[Any], str] | None) -> str | None:
    name = hp_name(trial) if hp_name is not None else f"run-{run_id}" if run_id is not None else None
    if name is not None and (Path(str(name)).name != name or name == ".."):
        raise ConfigError(
            "Cannot use what hp_name(trial) returned.",
            f"It returned {name!r}, which cannot name the trial's folder.",
            "Return text without slashes.",
        )
    return name


@contextmanager
def _portable(handler: CallbackHandler) -> Iterator[None]:
    """Remove callbacks that cannot be pickled, and replace the notebook's progress bar; restore them at the end."""
    from ray import cloudpickle

    callbacks, picklable, bars = list(handler.callbacks), [], extra("progress")
    for callback in callbacks:
        try:
            cloudpickle.dumps(callback)
        except Exception as error:
            logger.warning("Ray's trials run without %s, which cannot be pickled: %s", type(callback).__name__, error)
        else:
            picklable.append(bars.ProgressCallback() if bars.is_notebook_table(callback) else callback)
    handler.callbacks[:] = picklable
    handler.refresh()
    try:
        yield
    finally:
        handler.callbacks[:] = callbacks
        handler.refresh()
