"""What is checked of the model when a Trainer is made, and of everything before a training launches anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hftrain.adapter.plan import TrainPlan
from hftrain.arguments.training import TrainingArguments
from hftrain.core.log import warn_once
from hftrain.loops.contract import check_features
from hftrain.rules.loops import used_in_evaluation, used_in_training
from hftrain.rules.model import check_copies, check_not_sharded
from hftrain.rules.optimizer import check_made, check_step
from hftrain.rules.saving import check_fits
from hftrain.rules.training import Given, check_ahead
from hftrain.run.output import Output
from hftrain.run.parts import TrainerHooks
from hftrain.run.plan import find_resume
from hftrain.run.writing import saves_at_all
from hftrain.step.legality import check_in_backward
from hftrain.strategies.base import Strategy
from hftrain.task.liger import apply_liger_kernels
from hftrain.task.module import TaskModule
from hftrain.task.noise import find_embeddings
from hftrain.task.quantized import check_quantized, is_quantized
from hftrain.trainer.data import TrainerData
from hftrain.trainer.evaluation import Evaluation


def check_before_training(
    trainer: TrainerHooks, data: TrainerData, evaluation: Evaluation, output: Output, resume: str | bool | None
) -> Path | None:
    """Raise for a training that cannot work; return the checkpoint to resume from.

    Args:
        resume: The documented `resume_from_checkpoint`.
    """
    args, strategy = trainer.args, trainer.strategy
    data.check_training()
    if saves_at_all(args, trainer.save_policy):
        output.check_writable()
    _check_optimizer(trainer)
    compiles = trainer.compiler.config is not None
    check_copies(args, strategy, trainer.model, compiles=compiles)
    check_quantized(trainer.model, compiles=compiles)
    strategy.check_model(trainer.model)
    _check_ahead(trainer, evaluation)
    writes_itself = trainer._is_overridden("_save_checkpoint")
    folder = find_resume(args, strategy, output, trainer._make_manager, resume, writes_itself=writes_itself)
    _check_loops(trainer, data, folder)
    check_fits(trainer.model, folder, is_split=trainer.get_tp_size() > 1, is_overridden=trainer._is_overridden)
    return folder


def _check_optimizer(trainer: TrainerHooks) -> None:
    given, strategy, task = trainer.optimizer_cls_and_kwargs, trainer.strategy, trainer.task
    check_made(
        strategy,
        task,
        optimizers=(trainer.optimizer, trainer.lr_scheduler),
        optimizer_cls_and_kwargs=given,
        is_overridden=trainer._is_overridden,
    )
    is_own = trainer.optimizer is not None or given is not None
    makes_own = type(task).configure_optimizers is not TaskModule.configure_optimizers
    if not (is_own or makes_own or "optimizer" in strategy.makes or trainer._is_overridden("create_optimizer")):
        kind, _ = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        accumulation = trainer.args.gradient_accumulation_steps
        check_in_backward(kind, strategy=strategy, precision=trainer.precision, accumulation=accumulation)
    elif given is not None:
        check_step(given[0])


def _check_ahead(trainer: TrainerHooks, evaluation: Evaluation) -> None:
    """Raise for a training that would fail late; see `check_ahead`."""
    args, given = trainer.args, trainer.optimizer_cls_and_kwargs

    def count_steps(loader: Any) -> int:
        total = trainer.get_total_train_batch_size(args)
        return TrainPlan(*trainer.set_initial_training_values(args, loader, total)).max_steps

    check_ahead(
        args,
        trainer.strategy,
        trainer.task,
        trainer.model,
        Given(
            train_dataset=trainer.train_dataset,
            eval_dataset=trainer.eval_dataset,
            eval_sets=evaluation.sets,
            data_collator=trainer.data_collator,
            label_names=trainer.label_names,
            compute_metrics=trainer.compute_metrics,
            preprocess_logits_for_metrics=trainer.preprocess_logits_for_metrics,
            compute_loss_func=trainer.compute_loss_func,
            callbacks=trainer.callback_handler.callbacks,
            is_overridden=trainer._is_overridden,
            count_steps=count_steps,
        ),
        optimizers=(trainer.optimizer, trainer.lr_scheduler),
        learning_rate=args.learning_rate if given is None else given[1].get("lr", args.learning_rate),
        spill_dir=trainer.spill_dir,
    )


def _check_loops(trainer: TrainerHooks, data: TrainerData, resume: Path | None) -> None:
    """Raise if the run uses a feature that a loop does not support."""
    args, strategy, loops = trainer.args, trainer.strategy, trainer.loops
    if "fit" in loops:
        dataset = None if trainer._is_overridden("get_train_dataloader") else trainer.train_dataset
        used = used_in_training(args, strategy, trainer.precision, trainer.save_policy, dataset=dataset, resume=resume)
        check_features(loops["fit"], used)
    if "evaluate" in loops and args.eval_strategy != "no":
        is_per_batch = args.batch_eval_metrics and trainer.compute_metrics is not None
        for dataset in data.eval_sets:
            used = used_in_evaluation(args, strategy, dataset=dataset, takes_turns=False, is_per_batch=is_per_batch)
            check_features(loops["evaluate"], used)


def prepare_model(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, noise_alpha: float | None) -> None:
    """Raise if the model does not work with the settings, and apply Liger kernels; called at construction."""
    check_not_sharded(model)
    if noise_alpha is not None:
        find_embeddings(model)
    if args.use_cache is not None:
        _set_cache(model, use_cache=args.use_cache)
    if args.use_liger_kernel:
        apply_liger_kernels(model, args.liger_kernel_config)
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
