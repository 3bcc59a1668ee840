"""Make a model ready to train: place, wrap and compile it, create optimizer and schedule, and assemble the step.

Refuse a schedule that ends early, an optimizer that was replaced, and control flags that only some ranks set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.default_flow import DefaultFlowCallback
from hftrain.checkpoint.fitting import restoring
from hftrain.checkpoint.writer import saves_at_all
from hftrain.core.devices import move
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.core.state import Counter, TrainerControl
from hftrain.evaluation.preparation import keeps_cache, switch_cache_off
from hftrain.loops.fit import AFTER_ACTING, pass_flags
from hftrain.optim.schedules import follows_metric
from hftrain.rules.task import check_optimizer
from hftrain.run.parts import RunParts, TrainerHooks
from hftrain.run.plan import check_same_settings
from hftrain.run.trained_parameters import TrainedParameters
from hftrain.step.assemble import assemble_stepper
from hftrain.step.legality import check_in_backward, check_per_sample, check_several
from hftrain.task.model_task import ModelTask
from hftrain.task.module import know_state, without_model

_ACTION_FLAGS = ("should_log", "should_evaluate", "should_save")
# The flags that the loop itself has cleared since the check before, by event.
_CLEARED_FLAGS: dict[str, tuple[str, ...]] = {
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_end": _ACTION_FLAGS,
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    AFTER_ACTING: _ACTION_FLAGS,
}


@contextmanager
def making_ready(parts: RunParts, resume: Path | None, *, max_steps: int) -> Iterator[None]:
    """Set the parts that train, through the documented hooks, and restore the bare model at the end. Collective."""
    trainer, undo = parts.trainer, ExitStack()
    try:
        _make_ready(parts, resume, max_steps, undo)
        yield
    finally:
        undo.close()
        trainer.task.model = trainer.model
        parts.computing.use(parts.precision, None)
        parts.services.end_steps()


def _make_ready(parts: RunParts, resume: Path | None, max_steps: int, undo: ExitStack) -> None:
    trainer, args, strategy, precision = parts.trainer, parts.args, parts.strategy, parts.precision
    task = parts.task = trainer.task
    know_state(task, parts.state)
    if strategy.world_size > 1:
        check_same_settings(args, strategy)
    # Before the weights are loaded: loading rounds them to the dtype of the parameters.
    model = parts.model = trainer.model = task.model = precision.convert(trainer.model)
    if resume is not None:
        with restoring(resume):
            parts.hooks.load_from_checkpoint(str(resume))
    with without_model(task):
        move(task, strategy.device)  # its metrics and other parts; the strategy places the model
    parts.hooks.align_special_tokens()
    parts.unchanged = _change_model(parts, model, undo)
    parts.services.forget_schedule()
    strategy.plan(num_steps=max_steps, num_warmup_steps=args.get_warmup_steps(max_steps))
    parts.trained = TrainedParameters(strategy, task, lambda: trainer.lr_scheduler)
    with parts.trained.splitting(model, saves=saves_at_all(args, parts.save_policy)):
        unheld_parameters = _wrap(parts, max_steps)
    optimizer = parts.optimizer
    trainer.compiler.compile(model)
    parts.services.cast_model()
    if "scheduler" in strategy.makes:
        trainer.lr_scheduler = strategy.schedule
    elif "optimizer" in strategy.makes:
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
    accumulation = args.gradient_accumulation_steps
    check_in_backward(optimizer, strategy=strategy, precision=precision, accumulation=accumulation)
    model.zero_grad()  # an interrupted run or the user may have left gradients
    trainer.optimizer = optimizer
    task.model = trainer.model_wrapped = parts.wrapped
    stepper = assemble_stepper(
        strategy=strategy,
        precision=precision,
        optimizer=optimizer,
        args=args,
        unclipped=parts.trained.outside,
        unheld=unheld_parameters,
        computing=parts.computing,
    )
    stepper = parts.trained.averaging(stepper)
    for wrap in parts.events.at_point("wrap_stepper"):
        stepper = wrap(stepper, args=args, model=model, optimizer=optimizer, strategy=strategy, precision=precision)
    parts.stepper = stepper
    parts.computing.use(stepper, optimizer)
    parts.facts = parts.services.begin_steps()


def _change_model(parts: RunParts, model: nn.Module, undo: ExitStack) -> Callable[[], AbstractContextManager[Any]]:
    """Switch the cache off, and gradient checkpointing and NEFTune on, before the model is wrapped.

    Args:
        undo: Restores the model when it is closed.

    Returns:
        Opens a context with the user's original configuration.
    """
    args, strategy, trainer = parts.args, parts.strategy, parts.trainer
    cache = undo.enter_context(ExitStack())
    is_off = args.gradient_checkpointing or strategy.recomputes or not keeps_cache(args)
    restore_cache = switch_cache_off(model) if is_off else None
    if restore_cache is not None:
        cache.callback(restore_cache)
    if args.gradient_checkpointing:
        options = args.gradient_checkpointing_kwargs
        recompute = strategy.recompute or extra("recompute").recompute_activations
        undo.callback(recompute(model, options if isinstance(options, dict) else {}))
    if trainer.neftune_noise_alpha is not None:
        parts.hooks.activate_neftune(model)
        undo.callback(parts.hooks.deactivate_neftune, model)
    if restore_cache is None:
        return nullcontext

    @contextmanager
    def unchanged() -> Iterator[None]:
        cache.close()
        try:
            yield
        finally:
            if (undo_switch := switch_cache_off(model)) is not None:
                cache.callback(undo_switch)

    return unchanged


def _division(parts: RunParts) -> int | None:
    """Return by how many micro-batches a loss is divided; None if a user's step does so."""
    trainer = parts.trainer
    if parts.hooks.is_overridden("training_step"):
        return None
    is_plain = isinstance(trainer.task, ModelTask) and trainer.task.count_rule is None
    is_scaled = is_plain and getattr(trainer, "loss_is_scaled_for_ga", None) is True
    return 1 if is_scaled else int(trainer.args.gradient_accumulation_steps)


def _wrap(parts: RunParts, max_steps: int) -> list[torch.Tensor]:
    """Wrap the model and create the optimizer in `_wrap_model`, or after it if an override did not.

    Returns:
        The task's parameters that the optimizer does not hold.
    """
    trainer, strategy, precision = parts.trainer, parts.strategy, parts.precision
    optimizers: list[torch.optim.Optimizer] = []
    unheld_parameters: list[torch.Tensor] = []

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if "scheduler" in strategy.makes:
            trainer.create_optimizer()
        else:
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        assert trainer.optimizer is not None
        # Checked here because a strategy may later put its own parameters into the groups.
        check_optimizer(trainer.optimizer, trainer.lr_scheduler, trainer.model)
        check_several(trainer.optimizer, strategy)
        check_per_sample(trainer.optimizer, strategy, precision, accumulation=_division(parts))
        parts.trained.find(trainer.optimizer)
        for parameter in parts.trained.outside:
            parameter.grad = None  # an interrupted run may have left it
        held_ids = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        unheld_parameters[:] = [p for p in trainer.task.parameters() if id(p) not in held_ids]
        return precision.attach(trainer.model, trainer.optimizer)

    strategy.parallelize = trainer.task.parallelize

    def wrap(model: nn.Module) -> nn.Module:
        wrapped, optimizer = strategy.setup(model, make_optimizer, precision.policy)
        assert optimizer is not None
        optimizers[:] = [optimizer]
        return wrapped

    parts.wrap = wrap
    try:
        wrapped = parts.hooks.wrap_model(parts.services.outermost())
    finally:
        parts.wrap = None
    if not optimizers:
        wrapped = wrap(wrapped)
    if strategy.unwrap(wrapped) is not trainer.model:
        raise ConfigError(
            f"{type(trainer).__name__}._wrap_model returned a {type(wrapped).__name__}.",
            f"strategy={strategy.name!r} cannot look through it to the model.",
            "Wrap the model before it is given to the Trainer, or return what super()._wrap_model returned.",
        )
    if not hasattr(optimizers[0], "optimizer"):
        # accelerate wraps optimizers, and code for transformers looks into the wrapper.
        optimizers[0].optimizer = optimizers[0]  # type: ignore[attr-defined]
    parts.wrapped, parts.optimizer = wrapped, optimizers[0]
    return unheld_parameters


def check_schedule(args: TrainingArguments, schedule: Any, *, max_steps: int) -> None:
    """Raise if the user's schedule ends before the run; warn if it depends on evaluations, and none is planned."""
    if isinstance(schedule, OneCycleLR) and schedule.total_steps < max_steps:
        raise ConfigError(
            f"Cannot train {max_steps} steps with this OneCycleLR:",
            f"it ends after total_steps={schedule.total_steps}, and it is stepped once per update.",
            f"Make it with total_steps={max_steps}.",
        )
    if follows_metric(schedule) and args.eval_strategy == "no":
        warn_once(
            f"{type(schedule).__name__} is stepped after each evaluation, but eval_strategy='no' asks for "
            "none: the learning rate stays as it is unless a callback evaluates. Set eval_strategy."
        )


def check_not_replaced(trainer: TrainerHooks, originals: tuple[Any, Any]) -> None:
    """Raise if a callback has replaced the optimizer or the schedule that the run steps and saves."""
    for name, original, inner in zip(("optimizer", "lr_scheduler"), originals, ("optimizer", "scheduler"), strict=True):
        current = getattr(trainer, name)
        if current is not original and getattr(current, inner, None) is not original:  # accelerate's wrapper holds it
            raise ConfigError(
                f"Cannot go on with another trainer.{name}:",
                "it was replaced during the run, which steps and saves the one that it began with.",
                "Change that one (its param_groups, add_param_group), or make the new one before the run: "
                f"override create_{name.replace('lr_', '')}, or pass optimizers=(...).",
                now=type(current).__name__,
                was=type(original).__name__,
            )


def flag_check(parts: RunParts) -> Callable[[str], None]:
    """Return a check that all ranks have the same control flags; see `FitHooks`. Collective.

    It raises `StrategyError`, which names flag, value and ranks. Flags that follow from the arguments cost nothing. A
    rank on which a callback has set or cleared others waits for the notes of the other ranks.
    """
    control, watch = parts.control, parts.strategy.watch
    if watch is None:
        return pass_flags
    # The flags that this rank knows all ranks to have.
    expected, num_checks = TrainerControl(), Counter()
    agreement = watch.agreement(
        num_checks,
        problem="Cannot continue with control flags that only some ranks set.",
        remedy="Set the same flags on every rank: decide by what all ranks know, such as the step or the metrics that "
        "on_evaluate is given.",
    )
    # It answers the same when it is asked a second time, which a subclass may not.
    flow = next((callback for callback in parts.events.callbacks if type(callback) is DefaultFlowCallback), None)

    def check(event: str) -> None:
        for name in _CLEARED_FLAGS.get(event, ()):
            setattr(expected, name, False)
        if flow is not None and event in ("on_step_end", "on_epoch_end"):
            getattr(flow, event)(parts.args, parts.state, expected)
        flags = {name: bool(getattr(control, name)) for name in vars(expected)}
        if flags != vars(expected):
            agreement.check([f"{name}={value}" for name, value in flags.items() if value != getattr(expected, name)])
            expected.update(flags)
        num_checks.value += 1

    return check
