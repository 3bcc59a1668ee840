"""A Trainer's model, with the documented properties that are detected of it, and its optimizer and schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.seed import set_seed
from hftrain.core.signatures import Hooks, takes_trial
from hftrain.core.types import Owns
from hftrain.data.columns import signature_columns
from hftrain.evaluation.preparation import align_special_tokens
from hftrain.optim.optimizers import optimizer_from_class
from hftrain.optim.schedules import ScheduleConfig, build_schedule
from hftrain.rules.task import check_not_lightning, check_optimizer, check_task, read_optimizers
from hftrain.run.parts import TrainerHooks, TrainerPart
from hftrain.strategies.base import has_engine
from hftrain.task.introspect import base_model, is_on_several_devices
from hftrain.task.items import counts_shifted_labels, loss_shifts_labels
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule
from hftrain.trainer.checks import prepare_model
from hftrain.trainer.loss_kinds import CountItemsCheck
from hftrain.trainer.training_steps import TrainingSteps

logger = get_logger(__name__)


class TrainerModel(TrainerPart):
    """Put a model into a task, and detect its documented properties.

    Attributes:
        outermost: The user's wrapper around the model, if any, else the model.
        accepts_count: Whether the model takes `num_items_in_batch`, as detected.
    """

    outermost: nn.Module
    accepts_count: bool

    def __init__(
        self, trainer: TrainerHooks, hooks: Hooks, steps: TrainingSteps, *, on_adopted: Callable[[], None]
    ) -> None:
        super().__init__(trainer, hooks)
        self._steps, self._on_adopted = steps, on_adopted
        # The documented properties as they were detected.
        self._detected: dict[str, Any] = {}

    def adopt(self, model: nn.Module) -> None:
        """Set the model to train; a plain module is put into a `ModelTask`."""
        trainer, args, strategy = self._trainer, self._trainer.args, self._trainer.strategy
        bare = strategy.unwrap(model)
        check_not_lightning(bare)
        if isinstance(bare, TaskModule):
            task = bare
            model = task.model if "model" in dict(bare.named_children()) else bare
        else:
            task = ModelTask(
                bare,
                label_names=args.label_names,
                label_smoothing=args.label_smoothing_factor,
                compute_loss_func=trainer.compute_loss_func,
                count_items=trainer.count_items,
            )
        check_task(task)
        trainer.task = task
        trainer.model = task.model = strategy.unwrap(task.model)
        # If the user wrapped the model, the forward pass goes through that wrapper.
        trainer.model_wrapped = self.outermost = model
        trainer.is_model_parallel = is_on_several_devices(trainer.model)
        strategy.place_model = bool(trainer.place_model_on_device)
        prepare_model(args, strategy, trainer.model, noise_alpha=trainer.neftune_noise_alpha)
        model_task = task if isinstance(task, ModelTask) else None
        self.accepts_count = model_task is not None and model_task.accepts_item_count
        shifts = counts_shifted_labels() and loss_shifts_labels(base_model(trainer.model))
        self.find("label_names", list(model_task.label_names) if model_task else ["labels"])
        self.find("can_return_loss", model_task.can_return_loss if model_task else False)
        self.find("_loss_shifts_labels", shifts)
        self.find("_signature_columns", None)
        if trainer.optimizer is not None and trainer.model_init is None:
            check_optimizer(trainer.optimizer, trainer.lr_scheduler, trainer.model)
        self._steps.items_check = CountItemsCheck(task)
        self._on_adopted()

    def find(self, name: str, value: Any) -> None:
        """Set a detected property of the Trainer, unless a subclass declares it or has set another value since."""
        owner, detected = self._trainer, self._detected
        if hasattr(type(owner), name):
            return
        if name not in vars(owner) or vars(owner)[name] == detected.get(name):
            setattr(owner, name, value)
            detected[name] = value

    def find_columns(self) -> None:
        """Detect which columns of the data a plain model takes."""
        trainer = self._trainer
        if isinstance(trainer.task, ModelTask):
            self.find("_signature_columns", signature_columns(trainer.model, label_names=trainer.label_names))

    def align_special_tokens(self) -> None:
        """Copy the tokenizer's special tokens to the model's configurations, and say so."""
        changed = align_special_tokens(self._trainer.model, self._trainer.processing_class)
        if changed and self._trainer.strategy.is_main:
            logger.warning(
                "The tokenizer's special tokens differ from the model's. The model's config and generation "
                "config were changed to the tokenizer's: %s.",
                ", ".join(f"{name}={token}" for name, token in changed.items()),
            )

    def model_to_wrap(self) -> nn.Module:
        """Return the user's own wrapper, if it still holds the model, else the model."""
        model = self._trainer.model
        return self.outermost if self._trainer.strategy.unwrap(self.outermost) is model else model

    def rebuild(self) -> nn.Module:
        """Return the bare model, built again and adopted if there is a `model_init`."""
        trainer = self._trainer
        if trainer.model_init is not None:
            set_seed(trainer.args.seed)
            with trainer.strategy.building():
                self.adopt(trainer.call_model_init(self._hooks.trial))
            trainer.optimizer = trainer.lr_scheduler = None
        return trainer.model


class TrainerOptimizers(TrainerPart):
    """Make the optimizer of a Trainer, which holds it, and drop what an earlier run made."""

    _is_made_by_task = False

    def create(self, model: nn.Module | None) -> torch.optim.Optimizer:
        """Return the optimizer, made by the task or for a model if there is none."""
        trainer = self._trainer
        target = trainer.model if model is None else model
        if trainer.optimizer is None:
            trainer.optimizer, schedule = read_optimizers(trainer.task)
            self._is_made_by_task = trainer.optimizer is not None
            if schedule is not None:
                trainer.lr_scheduler = schedule
            if isinstance(schedule, TrainerCallback):
                trainer.add_callback(schedule)
        if trainer.optimizer is None:
            class_and_options = trainer.optimizer_cls_and_kwargs
            optimizer_class, options = class_and_options or trainer.get_optimizer_cls_and_kwargs(trainer.args, target)
            decay_names = trainer.get_decay_parameter_names(target)
            weight_decay = trainer.args.weight_decay
            trainer.optimizer = optimizer_from_class(
                optimizer_class, options, target, weight_decay=weight_decay, decay_names=decay_names
            )
        return trainer.optimizer

    def make_schedule(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None) -> Any:
        """Return the schedule that the arguments choose."""
        config = ScheduleConfig.of(self._trainer.args, num_training_steps=num_training_steps)
        return build_schedule(config, self.require("create_scheduler") if optimizer is None else optimizer)

    def require(self, asker: str) -> torch.optim.Optimizer:
        """Return the optimizer; raise if there is none yet."""
        if self._trainer.optimizer is None:
            raise ConfigError(
                f"Cannot call {asker}() yet:",
                "no optimizer has been made.",
                "Call train() or create_optimizer(); an override of create_optimizer must set self.optimizer.",
            )
        return self._trainer.optimizer

    def group_of(self, parameter: str | nn.Parameter) -> dict[str, Any] | None:
        """Return the parameter group that holds a parameter, given itself or by its name in the model."""
        groups = self.require("get_optimizer_group").param_groups
        names = dict(self._trainer.model.named_parameters())
        target = names.get(parameter) if isinstance(parameter, str) else parameter
        return next((group for group in groups if any(each is target for each in group["params"])), None)

    def forget(self) -> None:
        """Drop the schedule of an earlier train(), and its optimizer if the task or an engine created it."""
        trainer, strategy = self._trainer, self._trainer.strategy
        if self._is_made_by_task:
            if isinstance(trainer.lr_scheduler, TrainerCallback):
                trainer.remove_callback(trainer.lr_scheduler)
            trainer.optimizer = trainer.lr_scheduler = None
        elif self._hooks.created_lr_scheduler:
            trainer.lr_scheduler = None
        elif getattr(trainer.lr_scheduler, "last_epoch", 0) > 0:
            logger.warning("The given schedule has been stepped before; it continues from its current step.")
        if Owns.STEP in strategy.owns and strategy.unwrap(trainer.model_wrapped) is not trainer.model_wrapped:
            # The optimizer of the earlier run belonged to an engine that no longer exists.
            logger.warning("strategy=%r starts this run with a new optimizer and a new schedule.", strategy.name)
            trainer.optimizer = trainer.lr_scheduler = None


def build_model(model_init: Callable[..., Any] | None, trial: Any, *, seed: int) -> nn.Module:
    """Seed, and return what a `model_init` makes, given the trial of a search if it takes one."""
    assert model_init is not None
    set_seed(seed)
    parameters = inspect.signature(model_init).parameters.values()
    if sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters) > 1:
        raise ConfigError(
            "Cannot call model_init:",
            "it takes more than the trial.",
            "Define it without arguments, or with the trial only.",
        )
    model: nn.Module | None = model_init(trial) if takes_trial(model_init) else model_init()
    if model is None:
        raise ConfigError("Cannot use what model_init returned:", "it is None.", "End it with return model.")
    return model


class EngineFlag:
    """Whether the Trainer's strategy uses an engine; code copied from transformers assigns the same value."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def __get__(self, trainer: Any, owner: type) -> Any:
        return self if trainer is None else has_engine(trainer.strategy, self._engine)

    def __set__(self, trainer: Any, value: Any) -> None:
        if bool(value) != has_engine(trainer.strategy, self._engine):
            raise ConfigError(
                f"Cannot set is_{self._engine}_enabled to {value}:",
                f"strategy={trainer.strategy.name!r} decides it.",
                "Pass another strategy= to the Trainer.",
            )
