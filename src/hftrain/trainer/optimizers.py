"""A Trainer's optimizer and schedule: made from the task or the arguments, and dropped before another run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.types import Owns
from hftrain.optim.optimizers import optimizer_from_class
from hftrain.optim.schedules import ScheduleConfig, build_schedule
from hftrain.rules.optimizer import read_optimizers
from hftrain.run.parts import TrainerPart

logger = get_logger(__name__)


class TrainerOptimizers(TrainerPart):
    """Make the optimizer of a Trainer, which holds it, and drop what an earlier run made."""

    _is_the_tasks = False

    def create(self, model: nn.Module | None) -> torch.optim.Optimizer:
        """Return the optimizer, made by the task or for a model if there is none."""
        trainer = self._trainer
        chosen_model = trainer.model if model is None else model
        if trainer.optimizer is None:
            trainer.optimizer, schedule = read_optimizers(trainer.task)
            self._is_the_tasks = trainer.optimizer is not None
            if schedule is not None:
                trainer.lr_scheduler = schedule
            if isinstance(schedule, TrainerCallback):
                trainer.add_callback(schedule)
        if trainer.optimizer is None:
            given = trainer.optimizer_cls_and_kwargs
            kind, options = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, chosen_model)
            decay_names = trainer.get_decay_parameter_names(chosen_model)
            weight_decay = trainer.args.weight_decay
            trainer.optimizer = optimizer_from_class(
                kind, options, chosen_model, weight_decay=weight_decay, decay_names=decay_names
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
        wanted = names.get(parameter) if isinstance(parameter, str) else parameter
        return next((group for group in groups if any(each is wanted for each in group["params"])), None)

    def forget(self) -> None:
        """Drop the schedule of an earlier train(), and its optimizer if the task or an engine created it."""
        trainer, strategy = self._trainer, self._trainer.strategy
        if self._is_the_tasks:
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
