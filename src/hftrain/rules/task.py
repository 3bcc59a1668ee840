"""Checks of what users hand in: models, tasks, functions, optimizers and schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.arguments.enums import DebugOption
from hftrain.arguments.training import TrainingArguments
from hftrain.core.elsewhere import lightning_base, names_elsewhere, warn_of_uncalled
from hftrain.core.errors import ConfigError, TaskError, a_kind
from hftrain.core.events import EVENTS
from hftrain.core.extras import extra
from hftrain.optim.groups import members_of
from hftrain.optim.schedules import follows_metric
from hftrain.step.stepper import has_own_steps
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import is_on_several_devices, is_quantized
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

_STEPS = ("training_step", "evaluation_step", "prediction_step", "count_items")


def check_not_lightning(model: Any) -> None:
    """Raise if a model is a LightningModule, whose hooks are never called here."""
    if lightning_base(model) == "LightningModule" and not isinstance(model, TaskModule):
        name = type(model).__name__
        raise TaskError(
            f"Cannot train {name}, a LightningModule:",
            "its hooks are not called here.",
            "Derive it from hftrain.TaskModule, with the network in self.model, validation_step as "
            "evaluation_step(self, batch), and steps that return what they logged; see docs/from_lightning.md.",
        )


def check_not_sharded(model: nn.Module) -> None:
    """Raise if a model was sharded when it was loaded, because it then synchronises gradients itself."""
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            f"Cannot train {type(model).__name__} as it was loaded with distributed_config=DistributedConfig(...):",
            "the strategy would wrap and synchronise its shards a second time.",
            "Load it without distributed_config, and let strategy='fsdp' shard it.",
        )


def check_copies(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, compiles: bool) -> None:
    """Raise if one process would have to replicate a model on several GPUs, and the model cannot be copied."""
    if strategy.name != "data_parallel":
        return
    reason = None
    if is_on_several_devices(model):
        reason = "Its layers are on several devices already."
    elif is_quantized(model):
        reason = "Its weights are quantized, and what they are packed in is not copied from device to device."
    elif compiles:
        reason = "torch_compile compiles for one device, and every batch would have new copies."
    elif DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        reason = "debug='underflow_overflow' watches modules, but every batch would run new copies of them."
    elif args.gradient_checkpointing and {"layer_classes", "selective"} & {*(args.gradient_checkpointing_kwargs or ())}:
        reason = "gradient_checkpointing_kwargs would run the layers of the first GPU in every copy."
    if reason:
        raise ConfigError(
            f"Cannot train {type(model).__name__} with strategy='data_parallel'.",
            reason,
            "Start one process per GPU with torchrun, or use strategy='single' (CUDA_VISIBLE_DEVICES=0).",
        )


def check_task(task: TaskModule) -> None:
    """Raise unless the task has a `model` with every trainable parameter, and valid methods."""
    class_name = type(task).__name__
    hidden_names = [name for name, _ in task.named_children() if callable(getattr(TaskModule, name, None))]
    if hidden_names:
        raise TaskError(
            f"Cannot use {class_name}.{hidden_names[0]}:",
            f"{hidden_names[0]}() is a method of every TaskModule.",
            "Give the child another name.",
        )
    if "model" not in dict(task.named_children()):
        raise TaskError(
            f"Cannot use {class_name} as a task:",
            "it has no child called 'model', which is what a strategy places and wraps.",
            "Assign the network to self.model in __init__ (after super().__init__()).",
        )
    outside = [name for name, p in task.named_parameters() if p.requires_grad and name.partition(".")[0] != "model"]
    if outside:
        raise TaskError(
            f"Cannot use {class_name} as a task:",
            f"it has trainable parameters outside its model ({', '.join(outside[:5])}), "
            "which no strategy would synchronise or shard.",
            "Move them into the module assigned to self.model.",
        )
    _check_names(type(task))
    _check_signatures(task)


def check_unused_by_task(args: Any, task: TaskModule, *, compute_loss_func: Any, count_items: Any = None) -> None:
    """Raise if a setting that only applies to plain models is given with a custom task."""
    if isinstance(task, ModelTask):
        return
    settings = {
        "compute_loss_func": compute_loss_func,
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "label_names": args.label_names,
        "count_items": count_items,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings:
        raise ConfigError(
            f"Cannot use {', '.join(settings)} with {type(task).__name__}.",
            "A task computes its own loss and knows its own labels.",
            "Do it in the task's training_step, evaluation_step and count_items.",
            **settings,
        )


def _check_names(task_class: type[TaskModule]) -> None:
    if lightning_base(task_class) is not None:
        # The class works with both libraries.
        return
    events = {**{event: event for event in EVENTS}, **names_elsewhere("events")}
    hooks = {name: f"Do it in {event} of a TrainerCallback." for name, event in events.items()}
    warn_of_uncalled(task_class, {**hooks, **names_elsewhere("other_events"), **names_elsewhere("module_methods")})


def _check_signatures(task: TaskModule) -> None:
    calls = {**dict.fromkeys(_STEPS, ("batch",)), "configure_optimizers": (), "metrics": ("stage",)}
    for name, parameters in calls.items():
        step = getattr(task, name)
        try:
            signature = inspect.signature(step)
        except ValueError:
            continue
        try:
            signature.bind(*parameters)
        except TypeError as error:
            descriptions = {"batch": "the batch alone", "stage": "the stage, 'train' or 'eval',"}
            raise TaskError(
                f"Cannot call {type(task).__name__}.{name}{signature}:",
                f"it is called with {descriptions.get(*parameters) if parameters else 'no argument'} ({error}).",
                f"Define {name}({', '.join(('self', *parameters))}).",
            ) from None


# Role -> the number of positional arguments, a keyword that may be passed, and the signature for errors.
_CALLS: dict[str, tuple[int, str, str]] = {
    "compute_loss_func": (2, "num_items_in_batch", "(outputs, labels, num_items_in_batch=None)"),
    "compute_metrics": (
        1,
        "compute_result",
        "(prediction), an EvalPrediction: prediction has predictions and label_ids",
    ),
    "data_collator": (1, "", "(samples), with a list of samples; datasets go by name (train_dataset=...)"),
    "eval_collator": (1, "", "(samples), with a list of samples"),
    "schedule.step": (0, "", "(), after each update; make timm's step_update(count) the step() of an object around it"),
    "preprocess_logits_for_metrics": (2, "", "(logits, labels)"),
}


def check_callable(role: str, function: Any) -> None:
    """Raise unless a value can be called."""
    if not callable(function):
        remedy = f"Pass a function, which is called as {role}{_CALLS[role][2]}" if role in _CALLS else "Pass a function"
        remedy += ", or override compute_loss" if role == "compute_loss_func" else ""
        raise ConfigError(f"Cannot use {a_kind(function)} as {role}:", "it is not callable.", f"{remedy}.")


def check_call(role: str, function: Callable[..., Any]) -> None:
    """Raise if a function cannot be called with the arguments of its role; those of unknown roles are not checked.

    Raises:
        ConfigError: It cannot be called at all.
        TaskError: It takes other arguments, or is a module class instead of an instance.
    """
    check_callable(role, function)
    if role not in _CALLS:
        return
    num_positional, keyword, signature_text = _CALLS[role]
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise TaskError(f"Cannot use the class {name} as {role}:", "calling it makes a module.", f"Pass {name}().")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C
        return
    reason = ""
    for keywords in ({}, {keyword: None} if keyword else {}):
        try:
            signature.bind(*[None] * num_positional, **keywords)
            return
        except TypeError as error:
            reason = reason or str(error)
    raise TaskError(
        f"Cannot call {name} as {role} ({reason}):",
        f"it is called as {role}{signature_text}.",
        f"Pass an instance: {name}()." if isinstance(function, type) else "Give it these parameters.",
    )


def check_optimizer(optimizer: torch.optim.Optimizer, schedule: Any, model: nn.Module) -> None:
    """Raise unless the optimizer has parameters of the model, and the schedule belongs to that optimizer."""
    parameter_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in parameter_ids for parameter in model.parameters()):
        raise ConfigError(
            f"Cannot train {type(model).__name__} with this {type(optimizer).__name__}:",
            "it holds none of the model's parameters, so nothing would change.",
            "Make it from model.parameters() of the model that you pass; after replacing the model, set "
            "trainer.optimizer and trainer.lr_scheduler to None.",
        )
    if not has_own_steps(optimizer):
        for member in members_of(optimizer):
            check_step(type(member))
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"Cannot use this {type(schedule).__name__}:",
            "it changes the learning rate of another optimizer than the one that trains.",
            "Make it from the optimizer that you pass.",
        )
    if hasattr(schedule, "step") and not follows_metric(schedule):
        check_call("schedule.step", schedule.step)


def check_step(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer's step calls the model again, as LBFGS does."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"Cannot train with {optimizer_class.__name__}.",
            "Its step needs a closure that runs the model again, and a step here runs it once: clipping, "
            "accumulation and the scaling of the loss would not reach what the closure computes.",
            "Use another optimizer, or step it in training_step of a task with automatic_optimization = False.",
        )


def read_optimizers(task: TaskModule) -> tuple[Any, Any]:
    """Return (optimizer, schedule) from the result of `configure_optimizers`; either may be None.

    Accepts None, an optimizer, a pair with its schedule, Lightning's ``{"optimizer": ..., "lr_scheduler": ...}``, and
    any of these by names.
    """
    result = task.configure_optimizers()
    if task.automatic_optimization and (result is None or isinstance(result, Optimizer)):
        return result, None
    optimizer, schedule = extra("own_optimizers").read_optimizers(task, result)
    return optimizer, schedule
