"""Checks of evaluations: their functions, data, intervals and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hftrain.adapter.data import loader_options, shard_plan
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import get_logger
from hftrain.core.signatures import accepts
from hftrain.core.types import Owns
from hftrain.data.datasets import EvalSet, has_length
from hftrain.data.loaders import build_loader
from hftrain.rules.task import check_call
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import base_model
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

logger = get_logger(__name__)


def best_metric_key(metric: str) -> str:
    """Return the name of a metric in the results of an evaluation."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def check_best_metric(
    args: TrainingArguments, *, task: TaskModule, compute_metrics: Callable[..., Any] | None, eval_dataset: Any
) -> None:
    """Raise if no evaluation can report `metric_for_best_model`.

    A task and a `compute_metrics` function may report any name; a rehearsal checks them on one batch.
    """
    if args.metric_for_best_model is None:
        return
    key = best_metric_key(args.metric_for_best_model)
    has_no_total = key == "eval_loss" and isinstance(eval_dataset, Mapping)
    loss_keys = [f"eval_{name}_loss" for name in eval_dataset] if isinstance(eval_dataset, Mapping) else ["eval_loss"]
    if not has_no_total and (compute_metrics is not None or not isinstance(task, ModelTask)):
        _look_for_metric(key, task, {} if compute_metrics is not None else task.metrics("eval"), loss_keys)
        return
    if key not in loss_keys:
        raise ConfigError(
            f"Cannot use metric_for_best_model={args.metric_for_best_model!r}.",
            "Without compute_metrics an evaluation reports the loss alone.",
            f"Pass compute_metrics, or set metric_for_best_model to {' or '.join(map(repr, loss_keys))}.",
        )


def _look_for_metric(key: str, task: TaskModule, metrics: Mapping[str, Any], losses: Sequence[str]) -> None:
    """Say at the start that no metric of a task has the wanted name; `StepOutput.logs` may still bring it."""
    names = [f"{loss.removesuffix('loss')}{name}" for loss in losses for name in metrics]
    is_known = isinstance(metrics, Mapping) and not any(isinstance(each, nn.ModuleDict) for each in metrics.values())
    if names and is_known and key not in (*names, *losses):
        logger.warning(
            "metric_for_best_model asks for %r, and the metrics of %s are %s. Correct the name, unless evaluation_step "
            "returns it in StepOutput(logs=...); otherwise the first evaluation ends the run.",
            key, type(task).__name__, ", ".join((*names, "eval_loss")),
        )  # fmt: skip


def check_functions(args: TrainingArguments, functions: Mapping[str, Any], *, computes_loss: bool) -> None:
    """Raise if a given function is not callable, or not with the arguments of its role.

    Args:
        functions: The functions, by their names in errors: those of the Trainer's arguments, if they have one.
        computes_loss: Whether the user's class overrides compute_loss; `compute_loss_func` is then not checked.
    """
    for name, function in functions.items():
        if function is None or (name == "compute_loss_func" and computes_loss):
            continue
        check_call(name, function)
        is_by_batch = args.batch_eval_metrics and "metrics" in name and not name.startswith("preprocess")
        if is_by_batch and not accepts(function, "compute_result"):
            raise ConfigError(
                "Cannot use batch_eval_metrics=True.",
                f"{name} is called with each batch, and takes no compute_result, which tells it the last one.",
                "Give it the argument compute_result, or leave batch_eval_metrics out.",
            )


def check_cadences(args: TrainingArguments, sets: Mapping[str, EvalSet], *, eval_steps: float | None) -> None:
    """Raise if the interval of an evaluation set is not a multiple of the run's.

    Args:
        eval_steps: Steps between the run's evaluations; None, or a share of the run, if not known yet.
    """
    if isinstance(args.eval_steps, str) and any(entry.every is not None for entry in sets.values()):
        raise ConfigError(
            f"Cannot use eval_steps={args.eval_steps!r} with evaluation sets that have an interval of their own.",
            "Theirs count optimizer updates.",
            "Give eval_steps in updates, or leave every= out.",
        )
    if args.eval_strategy != "steps" or eval_steps is None or isinstance(eval_steps, str) or eval_steps < 1:
        return
    for name, entry in sets.items():
        if entry.every is not None and entry.every % eval_steps:
            raise ConfigError(
                f"The evaluation set {name!r} is to be evaluated every {entry.every} steps.",
                f"The run evaluates every {int(eval_steps)} steps.",
                "Make it a multiple of eval_steps.",
                every=entry.every,
                eval_steps=eval_steps,
            )


def check_batches(args: TrainingArguments, strategy: Strategy, name: str, dataset: Any) -> None:
    """Raise if an evaluation would have no batch."""
    options = loader_options(args, is_training=False)
    if not args.dataloader_drop_last or not has_length(dataset):
        return
    own_plan, samples = shard_plan(args, strategy.data, is_training=False), range(len(dataset))
    plans = [replace(own_plan, rank=rank) for rank in range(own_plan.world_size)]
    if not any(len(build_loader(samples, plan, collate=list, **options)) for plan in plans):
        raise ConfigError(
            f"Cannot use eval_strategy={str(args.eval_strategy)!r}.",
            f"The evaluation set {name!r} has no full batch, and incomplete batches are dropped.",
            "Make per_device_eval_batch_size smaller, or set dataloader_drop_last=False.",
            dataloader_drop_last=True,
            per_device_eval_batch_size=args.eval_batch_size,
        )


def check_columns(
    args: TrainingArguments, model: nn.Module, label_names: Sequence[str], name: str, columns: set[str]
) -> None:
    """Raise if the columns of an evaluation's batches lack what `compute_metrics` needs."""
    labels, main_input, gap = list(label_names), getattr(model, "main_input_name", "input_ids"), None
    if labels and not set(labels) <= columns:
        gap = f"labels ({', '.join(labels)})"
        remedy = "Name the label columns in label_names, add them to the data, or leave compute_metrics out."
    elif "inputs" in args.include_for_metrics and main_input not in columns:
        gap = f"main input {main_input!r}"
        remedy = "Set main_input_name on the model to the column that it is to get."
    if gap:
        reason = f"The evaluation set {name!r} has no {gap} for it, only {', '.join(sorted(columns))}."
        raise TaskError("Cannot use compute_metrics.", reason, remedy)


def check_evaluation(args: Any, *, strategy: Strategy, task: TaskModule) -> None:
    """Raise if a setting needs a plain model, a model that accepts past states, or weights that can be cast."""
    if (args.bf16_full_eval or args.fp16_full_eval) and strategy.owns & Owns.CASTING:
        raise ConfigError(
            f"strategy={strategy.name!r} was to evaluate entirely in half precision.",
            "Its own engine holds the weights and decides their dtype.",
            "Use bf16=True or fp16=True, and leave the full evaluation out.",
            bf16_full_eval=args.bf16_full_eval,
            fp16_full_eval=args.fp16_full_eval,
        )
    if args.use_legacy_prediction_loop:
        raise ConfigError(
            "Cannot use use_legacy_prediction_loop=True.",
            "There is one loop, evaluation_loop, with the results of the older one.",
            "Leave it out; a subclass overrides evaluation_loop.",
        )
    plain_settings = {"past_index": args.past_index >= 0, "jit_mode_eval": args.jit_mode_eval}
    if any(plain_settings.values()) and not isinstance(task, ModelTask):
        name = next(name for name, is_on in plain_settings.items() if is_on)
        raise ConfigError(
            f"Cannot use {name}={getattr(args, name)!r} with {type(task).__name__}.",
            "A task calls its model in its own way.",
            "Do it in the task, or pass a plain model.",
        )
    if args.past_index >= 0 and not accepts(base_model(task.model).forward, "mems"):
        raise ConfigError(
            f"Cannot use past_index={args.past_index}.",
            f"{type(task.model).__name__}.forward takes no argument called mems, in which that output comes back.",
            "Add it, or leave past_index out.",
        )
    if args.past_index >= 0 and args.jit_mode_eval:
        raise ConfigError(
            f"Cannot use past_index={args.past_index} with jit_mode_eval=True.",
            "A trace has the inputs of the first batch, which has no memory yet.",
            "Leave jit_mode_eval out.",
        )
