"""Checks before a launch, for errors that would otherwise only appear late in a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hftrain.adapter.configs import schedule_config
from hftrain.adapter.data import loader_config, shard_plan
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import EarlyStoppingCallback
from hftrain.core.errors import ConfigError
from hftrain.core.seed import preserved_rng
from hftrain.data.eval_sets import EvalSet
from hftrain.data.loaders import build_loader
from hftrain.data.sending import check_sendable
from hftrain.data.sizes import has_length
from hftrain.optim.schedules import build_schedule
from hftrain.rules.data import batch_columns, check_inputs
from hftrain.rules.evaluation import check_batches, check_best_metric, check_columns, check_functions
from hftrain.rules.saving import check_saves
from hftrain.storage.files import check_writable
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule

_PREPARE = ("_prepare_inputs", "_prepare_input")


@dataclass(frozen=True)
class Given:
    """The data and the functions of a training, under the names of a Trainer's attributes."""

    train_dataset: Any
    eval_dataset: Any
    eval_sets: Mapping[str, EvalSet]
    data_collator: Any
    label_names: Sequence[str]
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    compute_loss_func: Any
    callbacks: Sequence[Any]
    is_overridden: Callable[[str], bool]
    """Tells whether the user's class overrides a hook."""
    count_steps: Callable[[Any], int]
    """Returns the number of updates of a run with a loader."""

    def overrides(self, *names: str) -> bool:
        """Tell whether the user's class overrides any of these hooks."""
        return any(map(self.is_overridden, names))


def check_ahead(
    args: TrainingArguments,
    strategy: Strategy,
    task: TaskModule,
    model: nn.Module,
    given: Given,
    *,
    optimizers: tuple[Any, Any],
    learning_rate: float,
    spill_dir: Path | None,
) -> None:
    """Raise if a training would fail later; reads no data and launches nothing.

    Args:
        optimizers: (optimizer, schedule); None for each that the run creates.
        learning_rate: The initial learning rate of a schedule.
        spill_dir: The folder for predictions that are stored on disk, or None.
    """
    _check_shapes(model)
    if args.output_dir and Path(args.output_dir).is_file():
        raise ConfigError(f"Cannot write to output_dir={args.output_dir!r}:", "it is a file.", "Give a folder's path.")
    names = ["preprocess_logits_for_metrics", "compute_loss_func"]
    names += [] if given.overrides("evaluation_loop") else ["compute_metrics"]
    functions = {name: getattr(given, name) for name in names}
    functions |= {f"the metrics of {name!r}": entry.metrics for name, entry in given.eval_sets.items()}
    check_functions(args, functions, computes_loss=given.overrides("compute_loss"))
    _check_metric(args, task, given)
    for callback in given.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.check_settings(args)
    makes_own = type(task).configure_optimizers is not TaskModule.configure_optimizers
    is_made = makes_own or "optimizer" in strategy.makes or optimizers[0] is not None
    makes_optimizer = not (is_made or given.overrides("create_optimizer", "create_optimizer_and_scheduler"))
    is_made = optimizers[1] is not None or "scheduler" in strategy.makes or given.overrides("create_scheduler")
    with preserved_rng():
        own = ("get_train_dataloader", "training_step", "compute_loss", "get_batch_samples", *_PREPARE)
        columns = None if given.overrides(*own) else batch_columns(task, given.train_dataset, given.data_collator)
        if columns is not None:
            check_inputs(model, columns)
        datasets = _eval_datasets(args, given)
        _check_workers(args, given, datasets)
        if not given.overrides("get_train_dataloader", "_get_train_sampler", "set_initial_training_values"):
            _check_plan(args, strategy, given, rate=learning_rate if makes_optimizer and not is_made else None)
        if args.eval_strategy != "no" and spill_dir is not None:
            check_writable(spill_dir)
        for name, dataset in datasets.items():
            _check_evaluation(args, strategy, task, model, given, name, dataset)
    if args.save_strategy != "no":
        is_own = given.overrides("save_model", "_save", "_save_checkpoint")
        check_saves(args, strategy, task, model, given.callbacks, is_own=is_own)
    if makes_optimizer and not any(parameter.requires_grad for parameter in model.parameters()):
        asked, remedy = f"Cannot train {type(model).__name__}:", "Call requires_grad_(True) on those to train."
        if not any(True for _ in model.parameters()):
            lists = "Keep layers as attributes or in nn.ModuleList; those in plain lists and dicts are not seen."
            raise ConfigError(asked, "it has no parameters.", lists)
        raise ConfigError(asked, "none of its parameters requires a gradient.", remedy)


def _check_shapes(model: nn.Module) -> None:
    """Raise if a lazy module of a model has not seen a batch yet: its parameters have no shape to optimize."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"Cannot train {type(model).__name__}:",
            f"{lazy[0]} has no shape yet, because its lazy module has not seen a batch.",
            "Call the model on one batch before train(), or use the module that takes the sizes, such as nn.Linear.",
        )


def _check_metric(args: TrainingArguments, task: TaskModule, given: Given) -> None:
    """Raise if nothing reports `metric_for_best_model`; called in train(), because metrics may be set until then."""
    listeners = (getattr(callback, "on_evaluate", None) for callback in given.callbacks)
    # A user callback's on_evaluate may add to the metrics that it receives.
    roots = {getattr(listener, "__module__", "").partition(".")[0] for listener in listeners if listener is not None}
    hooks = ("evaluate", "_evaluate", "evaluation_loop", "prediction_loop", "log", "_determine_best_metric")
    if given.overrides(*hooks) or roots - {"hftrain", "transformers"}:
        return
    own = next((entry.metrics for entry in given.eval_sets.values() if entry.metrics is not None), None)
    metrics = given.compute_metrics or own
    check_best_metric(args, task=task, compute_metrics=metrics, eval_dataset=given.eval_dataset)


def _eval_datasets(args: TrainingArguments, given: Given) -> dict[str, Any]:
    """Return the datasets that are evaluated during training, by name."""
    datasets = given.eval_dataset
    if args.eval_strategy == "no" or datasets is None or given.overrides("get_eval_dataloader"):
        return {}
    return dict(datasets) if isinstance(datasets, Mapping) else {"eval_dataset": datasets}


def _check_workers(args: TrainingArguments, given: Given, datasets: Mapping[str, Any]) -> None:
    parts: dict[str, Any] = {f"eval_dataset {name!r}": dataset for name, dataset in datasets.items()}
    if not given.overrides("get_train_dataloader"):
        parts |= {"train_dataset": given.train_dataset, "data_collator": given.data_collator}
    check_sendable(parts, num_workers=args.dataloader_num_workers, method=args.dataloader_multiprocessing_context)


def _check_plan(args: TrainingArguments, strategy: Strategy, given: Given, *, rate: float | None) -> None:
    """Raise if the data has no batch, or a schedule that begins at `rate` cannot be built for the run."""
    num_steps, dataset = args.max_steps, given.train_dataset
    if has_length(dataset):
        config = loader_config(args, is_training=True)
        plan = shard_plan(args, rank=strategy.rank, world_size=strategy.world_size, is_training=True)
        loader = build_loader(range(len(dataset)), config, plan, collate=list)
        num_steps = num_steps if rate is None else given.count_steps(loader)
    if rate is not None:
        stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float(rate))
        build_schedule(schedule_config(args, num_training_steps=num_steps), stand_in)


def _check_evaluation(
    args: TrainingArguments,
    strategy: Strategy,
    task: TaskModule,
    model: nn.Module,
    given: Given,
    name: str,
    dataset: Any,
) -> None:
    """Raise if a set evaluated during training has no batch, or lacks columns that the metrics need."""
    if not given.overrides("_get_eval_sampler"):
        check_batches(args, strategy, name, dataset)
    own = ("evaluate", "evaluation_loop", "prediction_loop", "prediction_step", *_PREPARE)
    columns = None if given.overrides(*own) else batch_columns(task, dataset, given.data_collator)
    entry = given.eval_sets.get(name)
    has_metrics = given.compute_metrics is not None or (entry is not None and entry.metrics is not None)
    if columns is not None and has_metrics:
        check_columns(args, model, given.label_names, name, columns)
