"""What is checked of the model when a Trainer is made, and of everything before a training launches anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hftrain.adapter.data import TrainPlan, loader_options, shard_plan
from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.manifest import OPTIMIZER
from hftrain.checkpoint.state_files import check_complete
from hftrain.checkpoint.writer import saves_at_all
from hftrain.core.elsewhere import warn_of_unread, watched
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.core.seed import preserved_rng
from hftrain.core.signatures import Hooks
from hftrain.data.datasets import EvalSet, has_length
from hftrain.data.loaders import build_loader, check_sendable
from hftrain.optim.schedules import ScheduleConfig, build_schedule
from hftrain.rules.data import batch_columns, check_inputs, check_with_datasets
from hftrain.rules.evaluation import check_batches, check_best_metric, check_cadences, check_columns, check_functions
from hftrain.rules.saving import check_save_policy, check_saves
from hftrain.rules.task import check_copies, check_not_sharded, check_step, check_unused_by_task
from hftrain.run.output import Output
from hftrain.run.parts import TrainerHooks
from hftrain.run.plan import find_resume
from hftrain.step.legality import check_in_backward
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import check_quantized, is_quantized
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, check_defined
from hftrain.trainer.data import TrainerData
from hftrain.trainer.evaluation import Evaluation

_PREPARE_HOOKS = ("_prepare_inputs", "_prepare_input")


def check_settings(trainer: TrainerHooks, data: TrainerData, evaluation: Evaluation) -> None:
    """Raise for data, intervals and a save policy that cannot work; called before the model is looked at."""
    data.check_kinds()
    check_save_policy(trainer.args, trainer.save_policy, trainer.strategy)
    check_cadences(trainer.args, evaluation.sets, eval_steps=trainer.args.eval_steps)


def check_with_model(trainer: TrainerHooks, data: TrainerData, evaluation: Evaluation) -> None:
    """Raise for settings that cannot work with the model."""
    args, task = trainer.args, trainer.task
    check_with_datasets(args, task, trainer.data_collator, [trainer.train_dataset])
    check_with_datasets(args, task, trainer.eval_collator or trainer.data_collator, data.eval_sets)
    check_unused_by_task(args, task, compute_loss_func=trainer.compute_loss_func, count_items=trainer.count_items)
    evaluation.check()


def check_before_training(
    trainer: TrainerHooks,
    hooks: Hooks,
    data: TrainerData,
    evaluation: Evaluation,
    output: Output,
    resume: str | bool | None,
) -> Path | None:
    """Raise for a training that cannot work; return the checkpoint to resume from."""
    args, strategy = trainer.args, trainer.strategy
    is_plain = isinstance(trainer.task, ModelTask)
    if not (is_plain or trainer.loops or hooks.is_overridden("training_step", "compute_loss")):
        check_defined(trainer.task, "training_step")
    data.check_training()
    if saves_at_all(args, trainer.save_policy):
        output.check_writable()
    _check_optimizer(trainer, hooks)
    compiles = trainer.compiler.config is not None
    check_copies(args, strategy, trainer.model, compiles=compiles)
    check_quantized(trainer.model, compiles=compiles)
    strategy.check_model(trainer.model)
    _check_run(trainer, hooks, evaluation.sets)
    folder = find_resume(trainer, hooks, output, resume)
    if watched:
        warn_of_unread(is_resume=folder is not None)
    _check_loops(trainer, hooks, data, folder)
    if folder is not None:
        check_complete(folder, OPTIMIZER)
    return folder


def _check_optimizer(trainer: TrainerHooks, hooks: Hooks) -> None:
    """Raise if the strategy's config and another setting make an optimizer or a schedule, or it cannot be used."""
    class_and_options, strategy, task = trainer.optimizer_cls_and_kwargs, trainer.strategy, trainer.task
    is_configured = type(task).configure_optimizers is not TaskModule.configure_optimizers
    makers = {
        "optimizer": {
            "optimizers[0]": trainer.optimizer is not None,
            "optimizer_cls_and_kwargs": class_and_options is not None,
            f"{type(task).__name__}.configure_optimizers": is_configured,
            "an override of create_optimizer": hooks.is_overridden("create_optimizer"),
            # A given schedule would need the optimizer, which does not exist yet.
            "optimizers[1]": trainer.lr_scheduler is not None,
        },
        "scheduler": {
            "optimizers[1]": trainer.lr_scheduler is not None,
            "an override of create_scheduler": hooks.is_overridden("create_scheduler"),
        },
    }
    for part in sorted(strategy.makes):
        conflicts = [name for name, is_present in makers[part].items() if is_present]
        if conflicts:
            raise ConfigError(
                f"The config of strategy={strategy.name!r} has {'an' if part[0] == 'o' else 'a'} {part}.",
                f"{', '.join(conflicts)} would make one too, or drive another.",
                "Keep one of the two.",
            )
    is_passed = trainer.optimizer is not None or class_and_options is not None
    if not (is_passed or is_configured or "optimizer" in strategy.makes or hooks.is_overridden("create_optimizer")):
        optimizer_class, _ = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        accumulation = trainer.args.gradient_accumulation_steps
        check_in_backward(optimizer_class, strategy=strategy, precision=trainer.precision, accumulation=accumulation)
    elif class_and_options is not None:
        check_step(class_and_options[0])


def _check_run(trainer: TrainerHooks, hooks: Hooks, sets: Mapping[str, EvalSet]) -> None:
    """Raise if a training would fail later; reads no data and launches nothing."""
    args, strategy, task, model = trainer.args, trainer.strategy, trainer.task, trainer.model
    _check_shapes(model)
    if args.output_dir and Path(args.output_dir).is_file():
        raise ConfigError(f"Cannot write to output_dir={args.output_dir!r}:", "it is a file.", "Give a folder's path.")
    names = ["preprocess_logits_for_metrics", "compute_loss_func"]
    names += [] if hooks.is_overridden("evaluation_loop") else ["compute_metrics"]
    functions = {name: getattr(trainer, name) for name in names}
    functions |= {f"the metrics of {name!r}": entry.metrics for name, entry in sets.items()}
    check_functions(args, functions, computes_loss=hooks.is_overridden("compute_loss"))
    _check_metric(trainer, hooks, sets)
    callbacks = trainer.callback_handler.callbacks
    for callback in callbacks:
        if callable(check := getattr(callback, "check_settings", None)):
            check(args)
    _check_averages(callbacks)
    is_configured = type(task).configure_optimizers is not TaskModule.configure_optimizers
    is_made = is_configured or "optimizer" in strategy.makes or trainer.optimizer is not None
    makes_optimizer = not (is_made or hooks.is_overridden("create_optimizer", "create_optimizer_and_scheduler"))
    is_made = trainer.lr_scheduler is not None or "scheduler" in strategy.makes
    makes_schedule = makes_optimizer and not (is_made or hooks.is_overridden("create_scheduler"))
    with preserved_rng():
        hook_names = ("get_train_dataloader", "training_step", "compute_loss", "get_batch_samples", *_PREPARE_HOOKS)
        columns = None
        if not hooks.is_overridden(*hook_names):
            columns = batch_columns(task, trainer.train_dataset, trainer.data_collator)
        if columns is not None:
            check_inputs(model, columns)
        datasets = _eval_datasets(trainer, hooks)
        _check_workers(trainer, hooks, datasets)
        if not hooks.is_overridden("get_train_dataloader", "_get_train_sampler", "set_initial_training_values"):
            _check_schedule(trainer, makes_schedule=makes_schedule)
        for name, dataset in datasets.items():
            _check_evaluation(trainer, hooks, sets.get(name), name, dataset)
    if saves_at_all(args, trainer.save_policy):
        is_overridden = hooks.is_overridden("save_model", "_save", "_save_checkpoint")
        check_saves(args, strategy, task, model, callbacks, saves_itself=is_overridden)
    if makes_optimizer and not any(parameter.requires_grad for parameter in model.parameters()):
        problem, remedy = f"Cannot train {type(model).__name__}:", "Call requires_grad_(True) on those to train."
        if not any(True for _ in model.parameters()):
            advice = "Keep layers as attributes or in nn.ModuleList; those in plain lists and dicts are not seen."
            raise ConfigError(problem, "it has no parameters.", advice)
        raise ConfigError(problem, "none of its parameters requires a gradient.", remedy)


def _check_averages(callbacks: Sequence[Any]) -> None:
    """Raise if several callbacks give the model weights of their own."""
    averages = [type(callback).__name__ for callback in callbacks if hasattr(callback, "evaluation_weights")]
    if len(averages) > 1:
        raise ConfigError(
            f"Cannot use {' and '.join(averages)} in one training.",
            "Each would give the model its own weights for evaluations and at the end, and the last one would win.",
            "Keep one of them.",
        )


def _check_shapes(model: nn.Module) -> None:
    """Raise if a lazy module of a model has not seen a batch yet: its parameters have no shape to optimize."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"Cannot train {type(model).__name__}:",
            f"{lazy[0]} has no shape yet, because its lazy module has not seen a batch.",
            "Call the model on one batch before train(), or use the module that takes the sizes, such as nn.Linear.",
        )


def _check_metric(trainer: TrainerHooks, hooks: Hooks, sets: Mapping[str, EvalSet]) -> None:
    """Raise if nothing reports `metric_for_best_model`; called in train(), because metrics may be set until then."""
    listeners = (getattr(callback, "on_evaluate", None) for callback in trainer.callback_handler.callbacks)
    # A user callback's on_evaluate may add to the metrics that it receives.
    packages = {getattr(listener, "__module__", "").partition(".")[0] for listener in listeners if listener is not None}
    hook_names = ("evaluate", "_evaluate", "evaluation_loop", "log", "_determine_best_metric")
    if hooks.is_overridden(*hook_names) or packages - {"hftrain", "transformers"}:
        return
    set_metrics = next((entry.metrics for entry in sets.values() if entry.metrics is not None), None)
    metrics = trainer.compute_metrics or set_metrics
    check_best_metric(trainer.args, task=trainer.task, compute_metrics=metrics, eval_dataset=trainer.eval_dataset)


def _eval_datasets(trainer: TrainerHooks, hooks: Hooks) -> dict[str, Any]:
    """Return the datasets that are evaluated during training, by name."""
    datasets = trainer.eval_dataset
    if trainer.args.eval_strategy == "no" or datasets is None or hooks.is_overridden("get_eval_dataloader"):
        return {}
    return dict(datasets) if isinstance(datasets, Mapping) else {"eval_dataset": datasets}


def _check_workers(trainer: TrainerHooks, hooks: Hooks, datasets: Mapping[str, Any]) -> None:
    args = trainer.args
    parts: dict[str, Any] = {f"eval_dataset {name!r}": dataset for name, dataset in datasets.items()}
    parts |= {"eval_collator": trainer.eval_collator} if datasets else {}
    if not hooks.is_overridden("get_train_dataloader"):
        parts |= {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
    check_sendable(parts, num_workers=args.dataloader_num_workers, method=args.dataloader_multiprocessing_context)


def _check_schedule(trainer: TrainerHooks, *, makes_schedule: bool) -> None:
    """Raise if the data has no batch, or the arguments' schedule cannot be built for the run."""
    args, strategy, dataset = trainer.args, trainer.strategy, trainer.train_dataset
    num_steps = args.max_steps
    if has_length(dataset):
        options = loader_options(args, is_training=True)
        plan = shard_plan(args, strategy.data, is_training=True)
        loader = build_loader(range(len(dataset)), plan, collate=list, **options)
        if makes_schedule:
            total_batch_size = trainer.get_total_train_batch_size(args)
            num_steps = TrainPlan(*trainer.set_initial_training_values(args, loader, total_batch_size)).max_steps
    # A stream's passes may be limited, and its steps be known later.
    if makes_schedule and num_steps > 0:
        class_and_options = trainer.optimizer_cls_and_kwargs
        rate = args.learning_rate if class_and_options is None else class_and_options[1].get("lr", args.learning_rate)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float(rate))
        build_schedule(ScheduleConfig.of(args, num_training_steps=num_steps), optimizer)


def _check_evaluation(trainer: TrainerHooks, hooks: Hooks, entry: EvalSet | None, name: str, dataset: Any) -> None:
    """Raise if a set evaluated during training has no batch, or lacks columns that the metrics need."""
    if not hooks.is_overridden("_get_eval_sampler"):
        check_batches(trainer.args, trainer.strategy, name, dataset)
    has_metrics = trainer.compute_metrics is not None or (entry is not None and entry.metrics is not None)
    hook_names = ("evaluate", "evaluation_loop", "prediction_step", *_PREPARE_HOOKS)
    if has_metrics and not hooks.is_overridden(*hook_names):
        columns = batch_columns(trainer.task, dataset, trainer.eval_collator or trainer.data_collator)
        if columns is not None:
            check_columns(trainer.args, trainer.model, trainer.label_names, name, columns)


def _check_loops(trainer: TrainerHooks, hooks: Hooks, data: TrainerData, resume: Path | None) -> None:
    """Raise if the run uses a feature that a loop does not support."""
    args, strategy, loops = trainer.args, trainer.strategy, trainer.loops
    if "fit" in loops:
        dataset = None if hooks.is_overridden("get_train_dataloader") else trainer.train_dataset
        own_loops, precision, policy = extra("own_loops"), trainer.precision, trainer.save_policy
        used_features = own_loops.used_in_training(args, strategy, precision, policy, dataset=dataset, resume=resume)
        own_loops.check_features(loops["fit"], used_features)
    if "evaluate" in loops and args.eval_strategy != "no":
        is_per_batch = args.batch_eval_metrics and trainer.compute_metrics is not None
        features = {"takes_turns": False, "is_per_batch": is_per_batch}
        for dataset in data.eval_sets:
            used_features = extra("own_loops").used_in_evaluation(args, strategy, dataset=dataset, **features)
            extra("own_loops").check_features(loops["evaluate"], used_features)


def prepare_model(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, noise_alpha: float | None) -> None:
    """Raise if the model does not work with the settings, and apply Liger kernels; called at construction."""
    check_not_sharded(model)
    if noise_alpha is not None:
        extra("neftune").find_embeddings(model)
    if args.use_cache is not None:
        _set_cache(model, use_cache=args.use_cache)
    if args.use_liger_kernel:
        extra("liger").apply_liger_kernels(model, args.liger_kernel_config)
    if is_quantized(model):
        # Moving quantized weights fails or loses them.
        strategy.place_model = False


def _set_cache(model: nn.Module, *, use_cache: bool) -> None:
    config = getattr(model, "config", None)
    if config is None or isinstance(config, Mapping):
        warn_once(f"use_cache={use_cache} has no effect: {type(model).__name__} has no config to set it in.")
        return
    config.use_cache = use_cache
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.use_cache = use_cache
