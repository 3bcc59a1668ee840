"""Everything that can be refused before a device or process group is touched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hftrain.adapter.plan import require_max_steps
from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.policy import SavePolicy
from hftrain.core.errors import ConfigError, TaskError, suggest
from hftrain.core.log import warn_once
from hftrain.data.sizes import has_length
from hftrain.strategies.base import Strategy
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule
from hftrain.trainer.tasks import check_not_lightning


class NoModelError(ConfigError, RuntimeError):
    """A Trainer was made without a model; the documented error is a `RuntimeError`."""


def check_arguments(args: Any) -> None:
    """Raise unless the arguments are hftrain's: another library's have other fields and defaults."""
    if not isinstance(args, TrainingArguments):
        kind = type(args)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} was given as args.",
            "Only hftrain's own TrainingArguments are read.",
            "Import TrainingArguments from hftrain, and call Trainer(model, TrainingArguments(output_dir), ...).",
        )


def check_strategy(args: Any, strategy: Strategy) -> None:
    """Raise where a strategy that was given as an object contradicts the device the arguments ask for."""
    if args.use_cpu and strategy.device_type != "cpu":
        raise ConfigError(
            f"use_cpu=True was asked for together with strategy={type(strategy).__name__}(...).",
            f"The strategy takes the device {str(strategy.planned_device)!r}.",
            "Make the strategy with use_cpu=True, or leave use_cpu out of the arguments.",
            use_cpu=True,
            strategy=strategy.name,
        )


def check_tensor_parallel(size: int, strategy: Strategy, *, is_handled: bool) -> None:
    """Raise where a model's layers are split over processes that would each read other data."""
    if size > 1 and not is_handled:
        raise ConfigError(
            f"A model whose layers are split over {size} processes was given.",
            f"With strategy={strategy.name!r} every process reads its own share of the data.",
            "Load the model without a tensor-parallel plan, or use DeepSpeed's tensor_parallel.",
            tp_size=size,
        )


def check_model(model: Any, model_init: Any) -> None:
    """Raise unless there is a way to get a model; warn if there are two."""
    if model is None and model_init is None:
        raise NoModelError(
            "Cannot make a Trainer without model and without model_init:",
            "`Trainer` requires either a `model` or `model_init` argument.",
            "Pass a TaskModule or an nn.Module as model, or a function that builds one as model_init.",
        )
    if model_init is not None and not callable(model_init):
        raise ConfigError(
            "model_init was given.",
            "It cannot be called.",
            "Pass a function that returns the model.",
            model_init=model_init,
        )
    check_not_lightning(model)
    if isinstance(model, nn.Module) and "_modules" not in vars(model):
        raise TaskError(
            f"Cannot use {type(model).__name__}:",
            "its __init__ does not call that of its base class.",
            "Call super().__init__() in its first line.",
        )
    if model is not None and not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else None
        raise TaskError(
            f"{f'The class {name}' if name else f'A {type(model).__name__}'} was given as model.",
            "It is not an nn.Module.",
            f"Pass {name}(...)." if name else "Pass a TaskModule or an nn.Module.",
        )
    if model is not None and model_init is not None:
        warn_once("model and model_init were given: train() replaces model with what model_init returns.")


def check_parts(*, model_init: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, collator: Any) -> None:
    """Raise where constructor arguments contradict each other."""
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise ConfigError(
            "optimizers was given.",
            "It is not a pair of an optimizer and a schedule.",
            "Pass (optimizer, schedule); either may be None.",
            optimizers=optimizers,
        )
    has_optimizers = any(part is not None for part in optimizers)
    if model_init is not None and has_optimizers:
        raise ConfigError(
            "optimizers=(...) was given together with model_init.",
            "model_init makes a new model, whose parameters the given optimizer does not hold.",
            "Override create_optimizer_and_scheduler, or pass optimizer_cls_and_kwargs.",
        )
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        raise ConfigError(
            "optimizers=(...) was given together with optimizer_cls_and_kwargs.",
            "Both choose the optimizer.",
            "Keep one of the two.",
        )
    if collator is not None and not callable(collator):
        raise ConfigError(
            f"Cannot use a {type(collator).__name__} as data_collator:",
            "it is not callable.",
            "Pass a function that takes a list of samples; datasets go by name (train_dataset=..., eval_dataset=...).",
        )


def check_sharding(args: Any, strategy: Strategy, *, optimizers: tuple[Any, Any]) -> None:
    """Raise where a strategy that gives each process a part of the model cannot do what was asked for."""
    if not strategy.shards_model:
        return
    name = strategy.name
    if optimizers[0] is not None:
        raise ConfigError(
            f"optimizers=({type(optimizers[0]).__name__}(...), ...) was given with strategy={name!r}.",
            "The strategy splits the parameters, and the given optimizer holds the whole ones.",
            "Pass optimizer_cls_and_kwargs, or override create_optimizer.",
        )
    for setting in ("batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "jit_mode_eval"):
        if getattr(args, setting):
            raise ConfigError(
                f"{setting}=True was asked for with strategy={name!r}.",
                "Each forward pass brings the processes' parts of the parameters together as they are, in step.",
                "Drop it, or use strategy='ddp'.",
            )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            f"save_only_model=True was asked for with load_best_model_at_end=True and strategy={name!r}.",
            "The best model is loaded into parts that are split among processes, from a complete checkpoint.",
            "Drop one of the two.",
            save_only_model=True,
            load_best_model_at_end=True,
        )


def check_eval_data(args: Any, eval_dataset: Any, *, has_own_loader: bool) -> None:
    """Raise where evaluations are planned without data, or on an empty set."""
    if args.eval_strategy == "no":
        return
    asked = f"eval_strategy={str(args.eval_strategy)!r} was asked for."
    sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval_dataset": eval_dataset}
    for name, dataset in sets.items():
        if has_length(dataset) and len(dataset) == 0:
            raise ConfigError(asked, f"{name} is empty.", "Pass a dataset with at least one sample.")
    if (eval_dataset is None or not sets) and not has_own_loader:
        remedy = "Pass eval_dataset, override get_eval_dataloader, or set eval_strategy='no'."
        raise ConfigError(asked, "There is no eval_dataset to evaluate on.", remedy)


def check_train_data(args: Any, dataset: Any) -> None:
    """Raise unless there is something to train on and a way to tell how long."""
    if dataset is None:
        raise ConfigError(
            "train() was called.",
            "There is no train_dataset.",
            "Pass train_dataset to the Trainer or override get_train_dataloader.",
        )
    if not has_length(dataset):
        require_max_steps(args)
    elif len(dataset) == 0:
        raise ConfigError("train() was called.", "train_dataset is empty.", "Pass a dataset with at least one sample.")


def check_optimizer(optimizer: torch.optim.Optimizer, schedule: Any, model: nn.Module) -> None:
    """Raise unless the optimizer holds parameters of the model, and the schedule drives that optimizer."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} was to be trained with a {type(optimizer).__name__}.",
            "The optimizer holds none of the model's parameters, so nothing would change.",
            "Make it from the parameters of the model that is trained; after replacing the model, set "
            "trainer.optimizer and trainer.lr_scheduler to None.",
        )
    check_step(type(optimizer))
    driven = getattr(schedule, "optimizer", optimizer)
    if driven is not optimizer:
        raise ConfigError(
            f"A {type(schedule).__name__} was to drive the learning rate.",
            "It was made for another optimizer than the one that trains.",
            "Make it from the same optimizer.",
        )


def check_step(kind: type[torch.optim.Optimizer]) -> None:
    """Raise where an optimizer's step calls the model again, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"A {kind.__name__} was to train.",
            "Its step needs a closure that runs the model again, and a step here runs it once: clipping, "
            "accumulation and the scaling of the loss would not reach what the closure computes.",
            "Use another optimizer, or run it yourself in an override of training_step.",
        )


def read_optimizers(made: Any, *, maker: str) -> tuple[Any, Any]:
    """Return (optimizer, schedule), either None, from what `configure_optimizers` returned.

    Raises:
        TaskError: It returned something else; the error names what.
    """
    optimizer, schedule = made if isinstance(made, (tuple, list)) and len(made) == 2 else (made, None)
    is_schedule = schedule is None or (hasattr(schedule, "step") and not isinstance(schedule, torch.optim.Optimizer))
    if (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)) and is_schedule:
        return optimizer, schedule
    shown = ", ".join(type(part).__name__ for part in made) if isinstance(made, (tuple, list)) else ""
    raise TaskError(
        f"{maker}.configure_optimizers was called.",
        f"It returned a {type(made).__name__}{f' of ({shown})' if shown else ''}.",
        "Return one optimizer, or one (optimizer, schedule) pair, or None to take them from the arguments.",
    )


def check_unused_by_task(args: Any, task: TaskModule, *, compute_loss_func: Any, count_items: Any = None) -> None:
    """Raise where a setting that only a plain model's loss reads is given with a task of one's own."""
    if isinstance(task, ModelTask):
        return
    given = {
        "compute_loss_func": compute_loss_func,
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "label_names": args.label_names,
        "count_items": count_items,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        raise ConfigError(
            f"{', '.join(given)} was given together with {type(task).__name__}.",
            "A task computes its own loss and knows its own labels.",
            "Do it in the task's training_step, evaluation_step and count_items.",
            **given,
        )


def check_best_metric(
    args: Any, *, task: TaskModule, compute_metrics: Callable[..., Any] | None, eval_dataset: Any
) -> None:
    """Raise where no evaluation can ever report `metric_for_best_model`.

    A task's own logs and a `compute_metrics` function may report any name: those are rehearsed on one batch.
    """
    if args.metric_for_best_model is None:
        return
    wanted = best_metric_key(args.metric_for_best_model)
    is_never_there = wanted == "eval_loss" and isinstance(eval_dataset, Mapping)
    if not is_never_there and (compute_metrics is not None or not isinstance(task, ModelTask)):
        return
    sets = [f"eval_{name}_loss" for name in eval_dataset] if isinstance(eval_dataset, Mapping) else ["eval_loss"]
    if wanted not in sets:
        raise ConfigError(
            f"metric_for_best_model={args.metric_for_best_model!r} was asked for.",
            "Without compute_metrics an evaluation reports the loss alone.",
            f"Pass compute_metrics, or choose one of these: {suggest(wanted, sets)}",
            metric_for_best_model=args.metric_for_best_model,
        )


def best_metric_key(metric: str) -> str:
    """Return the name a metric has in an evaluation's results."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def check_save_policy(args: Any, policy: SavePolicy) -> None:
    """Raise where what a `SavePolicy` asks for could not happen.

    Raises:
        ConfigError: It names both settings.
    """
    if policy.keep_best is not None and (args.metric_for_best_model is None or args.eval_strategy == "no"):
        raise ConfigError(
            f"SavePolicy(keep_best={policy.keep_best}) was asked for.",
            "No evaluation says which checkpoints are the best.",
            "Set metric_for_best_model, and eval_strategy to 'steps' or 'epoch'.",
            metric_for_best_model=args.metric_for_best_model,
            eval_strategy=str(args.eval_strategy),
        )
    if policy.on_exception and args.auto_find_batch_size == "smaller_batch":
        raise ConfigError(
            "SavePolicy(on_exception=True) was asked for with auto_find_batch_size='smaller_batch'.",
            "That starts the run again after an error, while a checkpoint is for going on.",
            "Use auto_find_batch_size=True, which cuts the batches of the step instead.",
        )
