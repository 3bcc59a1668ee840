"""Hyper-parameter search: a trial's values in the arguments for as long as it runs, and its results to the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrain.adapter.search import apply_hyperparameters
from hftrain.callbacks import NotebookProgressCallback, ProgressCallback
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.state import TrainerState
from hftrain.search.config import BestRun, HPSearchBackend, Report, SearchConfig, check_directions, choose_backend
from hftrain.search.defaults import (
    default_compute_objective,
    default_hp_space_optuna,
    default_hp_space_ray,
    default_hp_space_wandb,
)
from hftrain.search.optuna_study import report_to_optuna, search_with_optuna
from hftrain.search.ray_tune import search_with_ray
from hftrain.search.wandb_sweep import search_with_wandb
from hftrain.trainer.signatures import takes_trial

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Objective = Callable[[dict[str, float]], Any]

_SPACES: dict[HPSearchBackend, Callable[[Any], dict[str, Any]]] = {
    HPSearchBackend.OPTUNA: default_hp_space_optuna,
    HPSearchBackend.RAY: default_hp_space_ray,
    HPSearchBackend.WANDB: default_hp_space_wandb,
}


@dataclass(kw_only=True)
class TrialRun:
    """One trial while it runs.

    Args:
        trial: What `model_init` and hooks are given: the backend's trial, or a dict of values.
        name: Of the trial and of its folder; None for a plain dict of values.
        params: What is written into the arguments.
        compute_objective: Gets an evaluation's metrics.
        report: Told of each evaluation while training; may end the trial.
        values: The objective after the last evaluation, and the step of that.
    """

    trial: Any
    name: str | None
    params: dict[str, Any]
    compute_objective: Objective
    report: Report | None
    values: Any = None
    step: int | None = None

    def note(self, trainer: Trainer, metrics: Mapping[str, Any], *, step: int) -> None:
        """Compute the objective of an evaluation while training, and report it."""
        if not trainer._has_all_sets:
            # Sets with a cadence of their own: the objective needs all of them.
            return
        self.values, self.step = self.compute_objective(dict(metrics)), step
        if self.report is not None:
            try:
                self.report(self.values, step=step, folder=trainer._get_output_dir(self.trial))
            except Exception:
                # The trial is pruned: trackers close its run.
                trainer.callback_handler.fire("on_train_end")
                raise

    def describe(self, state: TrainerState) -> None:
        """Write into a run's state that this is a trial, and which."""
        state.is_hyper_param_search, state.trial_name = True, self.name
        state.trial_params = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in self.params.items()
        }


@contextmanager
def trying(
    trainer: Trainer,
    trial: Any,
    *,
    space: Callable[[Any], Any] | None = None,
    run_id: str | None = None,
    hp_name: Callable[[Any], str] | None = None,
    compute_objective: Objective | None = None,
    report: Report | None = None,
) -> Iterator[TrialRun]:
    """Put a trial's values into the arguments for as long as it runs.

    Args:
        trainer: Whose arguments change.
        trial: An Optuna trial, or a dict of values.
        space: Returns the values of a trial; None takes what it has suggested already.
        run_id: The backend's name for it; None takes the number of an Optuna trial.
        hp_name: Names the trial and its folder.
        compute_objective: Gets an evaluation's metrics.
        report: Told of evaluations.

    Raises:
        ConfigError: There is no `model_init`, or a value is none that the arguments take.
    """
    model_init = check_model_init(trainer, asked="train(trial=...)")
    is_dict = isinstance(trial, Mapping)
    if not is_dict and not hasattr(trial, "suggest_float"):
        raise ConfigError(
            "train(trial=...) was called.",
            f"A {type(trial).__name__} is not a trial.",
            "Pass an Optuna trial, or a dict of hyper-parameters.",
        )
    if not is_dict:
        run_id = str(trial.number)
        report = partial(report_to_optuna, trial) if space is None else report
    params = _values(trial, space)
    args, before, noise = trainer.args, dict(vars(trainer.args)), trainer.neftune_noise_alpha
    name = _name(trial, run_id, hp_name)
    try:
        unknown = apply_hyperparameters(args, params, is_for_model=takes_trial(model_init))
        if unknown:
            logger.warning("Only model_init(trial) sees these hyper-parameters, no setting does: %s.", unknown)
        if name is not None:
            args.output_dir = trainer._output.below(name)
        if args.neftune_noise_alpha != before["neftune_noise_alpha"]:
            trainer.neftune_noise_alpha = args.neftune_noise_alpha
        if trainer.is_deepspeed_enabled:
            trainer.propagate_args_to_deepspeed()
        # It describes the arguments; whoever wants one gets a new one.
        trainer._accelerator = None
        compute = compute_objective or default_compute_objective
        run = TrialRun(trial=trial, name=name, params=params, compute_objective=compute, report=report)
        trainer._trial, trainer._trial_run = trial, run
        yield run
    finally:
        trainer._trial = trainer._trial_run = None
        vars(args).clear()
        vars(args).update(before)
        trainer.neftune_noise_alpha, trainer._accelerator = noise, None
        if trainer.is_deepspeed_enabled:
            trainer.propagate_args_to_deepspeed()


def search(
    trainer: Trainer,
    *,
    space: Callable[[Any], Any] | None,
    compute_objective: Objective | None,
    num_trials: int | None,
    direction: str | list[str],
    backend: str | HPSearchBackend | None,
    hp_name: Callable[[Any], str] | None,
    options: Mapping[str, Any],
) -> BestRun | list[BestRun]:
    """Search with a backend; see `Trainer.hyperparameter_search`."""
    check_model_init(trainer, asked="hyperparameter_search()")
    if trainer.fast_dev_run:
        raise ConfigError(
            "hyperparameter_search() was called.",
            "With fast_dev_run nothing is trained that an objective could be computed of.",
            "Rehearse with train(trial={...}), and search without fast_dev_run.",
            fast_dev_run=trainer.fast_dev_run,
        )
    _check_data(trainer)
    chosen = choose_backend(backend)
    config = SearchConfig(
        space=space or _SPACES[chosen],
        num_trials=num_trials,
        directions=check_directions(direction, chosen),
        options=options,
        scope=trainer.args.ray_scope or "last",
    )
    attempt = partial(
        run_attempt, trainer, num_objectives=len(config.directions), compute=compute_objective, hp_name=hp_name
    )
    trainer.hp_search_backend = chosen
    try:
        if chosen is HPSearchBackend.OPTUNA:
            trainer.strategy.launch()
            return search_with_optuna(config, attempt, group=trainer.strategy)
        _check_one_process(trainer, chosen)
        if chosen is HPSearchBackend.WANDB:
            return search_with_wandb(config, attempt)
        with _portable(trainer):
            return search_with_ray(config, attempt, evaluates=trainer.args.eval_strategy != "no")
    finally:
        trainer.hp_search_backend = None


def run_attempt(
    trainer: Trainer,
    trial: Any,
    *,
    num_objectives: int,
    compute: Objective | None,
    hp_name: Callable[[Any], str] | None,
    space: Callable[[Any], Any] | None = None,
    run_id: str | None = None,
    report: Report | None = None,
    resume: str | None = None,
) -> Any:
    """Train and evaluate once; returns the objective, a list of them where there are several. Collective."""
    with trying(
        trainer,
        trial,
        space=space,
        run_id=run_id,
        hp_name=hp_name,
        compute_objective=compute,
        report=report,
    ) as run:
        trainer.train(resume_from_checkpoint=resume, trial=trial)
        if run.step != trainer.state.global_step or trainer.args.load_best_model_at_end:
            # The model that the trial ends with has not been evaluated.
            run.values = run.compute_objective(dict(trainer.evaluate()))
        return _objectives(run.values, num_objectives)


def check_model_init(trainer: Trainer, *, asked: str) -> Callable[..., Any]:
    """Return what makes new models; raises without."""
    if trainer.model_init is None:
        raise ConfigError(
            f"{asked} was called.",
            "Each trial trains a new model, and there is no model_init to make one.",
            "Pass model_init=, a function that returns the model, instead of model=.",
        )
    return trainer.model_init


def _check_data(trainer: Trainer) -> None:
    has_own = any(map(trainer._is_overridden, ("get_eval_dataloader", "evaluate")))
    if trainer.eval_dataset is None and not has_own:
        raise ConfigError(
            "hyperparameter_search() was called.",
            "A trial's objective comes from an evaluation, and there is no eval_dataset.",
            "Pass eval_dataset= to the Trainer.",
        )


def _check_one_process(trainer: Trainer, backend: HPSearchBackend) -> None:
    if trainer.strategy.world_size > 1:
        raise ConfigError(
            f"backend={backend.value!r} was asked for on {trainer.strategy.world_size} processes.",
            "It runs trials in processes of its own choice.",
            "Launch one process, or use backend='optuna', whose trials run on all processes together.",
        )


def _values(trial: Any, space: Callable[[Any], Any] | None) -> dict[str, Any]:
    if isinstance(trial, Mapping):
        return dict(trial)
    if space is None:
        return dict(trial.params) or default_hp_space_optuna(trial)
    values = space(trial)
    if not isinstance(values, Mapping):
        raise ConfigError(
            "hp_space(trial) was called.",
            f"It returned a {type(values).__name__}.",
            "Return a dict: the names of settings, and what trial.suggest_* gave for each.",
        )
    return dict(values)


def _name(trial: Any, run_id: str | None, hp_name: Callable[[Any], str] | None) -> str | None:
    name = hp_name(trial) if hp_name is not None else f"run-{run_id}" if run_id is not None else None
    if name is not None and (Path(str(name)).name != name or name == ".."):
        raise ConfigError(
            "hp_name(trial) was called.",
            f"It returned {name!r}, which cannot name the trial's folder.",
            "Return text without slashes.",
        )
    return name


def _objectives(values: Any, number: int) -> Any:
    found = list(values) if isinstance(values, (list, tuple)) else [values]
    if len(found) != number:
        raise ConfigError(
            "compute_objective(metrics) was called.",
            f"It returned {len(found)} values for {number} directions.",
            "Return as many numbers as direction= has entries.",
            values=values,
        )
    numbers = [float(each) for each in found]
    return numbers if number > 1 else numbers[0]


@contextmanager
def _portable(trainer: Trainer) -> Iterator[None]:
    """Take out what cannot travel to another process, and put it back; the notebook's bar is a plain one there."""
    from ray import cloudpickle

    handler, accelerator = trainer.callback_handler, trainer._accelerator
    callbacks, travelling = list(handler.callbacks), []
    for callback in callbacks:
        try:
            cloudpickle.dumps(callback)
        except Exception as error:
            logger.warning("Ray's trials run without %s, which cannot be pickled: %s", type(callback).__name__, error)
        else:
            is_notebook = isinstance(callback, NotebookProgressCallback)
            travelling.append(ProgressCallback() if is_notebook else callback)
    handler.callbacks[:] = travelling
    handler.refresh()
    trainer._accelerator = None
    try:
        yield
    finally:
        handler.callbacks[:] = callbacks
        handler.refresh()
        trainer._accelerator = accelerator
