"""Trainer methods that create optimizer and schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hftrain.adapter.configs import optimizer_config, schedule_config
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.types import Owns
from hftrain.optim.groups import decay_parameter_names
from hftrain.optim.optimizers import optimizer_class, optimizer_from_class
from hftrain.optim.schedules import build_schedule
from hftrain.rules.optimizer import check_made, check_step, made_optimizers
from hftrain.step.legality import check_in_backward
from hftrain.task.module import TaskModule
from hftrain.trainer.data_methods import DataMethods

logger = get_logger(__name__)


class OptimizerMethods(DataMethods):
    """Create the optimizer and the schedule."""

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the first parameter group; for logs, the rate that the step used."""
        return self.get_learning_rates()[0] if self._used_rate is None else self._used_rate

    def _check_optimizer(self) -> None:
        """Raise, before anything is launched, if the optimizer cannot be created."""
        check_made(
            self.strategy,
            self.task,
            optimizers=(self.optimizer, self.lr_scheduler),
            optimizer_cls_and_kwargs=self.optimizer_cls_and_kwargs,
            is_overridden=self._is_overridden,
        )
        is_own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        makes_own = type(self.task).configure_optimizers is not TaskModule.configure_optimizers
        is_made = "optimizer" in self.strategy.makes
        if not (is_own or makes_own or is_made or self._is_overridden("create_optimizer")):
            self._check_in_backward(self.get_optimizer_cls_and_kwargs(self.args, self.model)[0])
        elif self.optimizer_cls_and_kwargs is not None:
            check_step(self.optimizer_cls_and_kwargs[0])

    def _check_in_backward(self, optimizer: Any) -> None:
        accumulation = self.args.gradient_accumulation_steps
        check_in_backward(optimizer, strategy=self.strategy, precision=self.precision, accumulation=accumulation)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create the optimizer and the schedule; override this method or either of the two it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer unless it exists, and return it.

        Args:
            model: The model whose parameters it gets; None takes the Trainer's.

        Source: the documented `create_optimizer`.
        """
        chosen_model = self.model if model is None else model
        if self.optimizer is None:
            made = made_optimizers(self.task)
            self._optimizer_is_the_tasks = made[0] is not None
            self.optimizer = made[0]
            if made[1] is not None:
                self.lr_scheduler = made[1]
        if self.optimizer is None:
            if self.optimizer_cls_and_kwargs is None:
                chosen = self.get_optimizer_cls_and_kwargs(self.args, chosen_model)
            else:
                chosen = self.optimizer_cls_and_kwargs
            names = self.get_decay_parameter_names(chosen_model)
            self.optimizer = optimizer_from_class(
                *chosen, chosen_model, weight_decay=self.args.weight_decay, decay_names=names
            )
        return self.optimizer

    def _forget_schedule(self) -> None:
        """Drop the schedule of an earlier train(), and its optimizer if the task or an engine created it."""
        if self._optimizer_is_the_tasks:
            self.optimizer = self.lr_scheduler = None
        elif self._created_lr_scheduler:
            self.lr_scheduler = None
        elif getattr(self.lr_scheduler, "last_epoch", 0) > 0:
            logger.warning("The given schedule has been stepped before; it continues from its current step.")
        strategy = self.strategy
        if Owns.STEP in strategy.owns and strategy.unwrap(self.model_wrapped) is not self.model_wrapped:
            # The optimizer of the earlier run belonged to an engine that no longer exists.
            logger.warning("strategy=%r starts this run with a new optimizer and a new schedule.", strategy.name)
            self.optimizer = self.lr_scheduler = None

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the schedule unless it exists, and return it. Source: the documented `create_scheduler`."""
        if self.lr_scheduler is None:
            self._created_lr_scheduler = True
            chosen = self._require_optimizer("create_scheduler") if optimizer is None else optimizer
            self.lr_scheduler = build_schedule(
                schedule_config(self.args, num_training_steps=num_training_steps), chosen
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that weight decay applies to."""
        return decay_parameter_names(model)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the optimizer class and keyword arguments selected by the training arguments."""
        return optimizer_class(optimizer_config(args), model)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of every parameter group; requires an optimizer."""
        return [float(group["lr"]) for group in self._require_optimizer("get_learning_rates").param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the parameter group that holds `param`, or the parameters of every group; needs an optimizer."""
        optimizer = self._require_optimizer("get_optimizer_group")
        if param is None:
            return [group["params"] for group in optimizer.param_groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in optimizer.param_groups:
            if any(member is wanted for member in group["params"]):
                return group
        return None

    def _require_optimizer(self, asker: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError(
                f"Cannot call {asker}() yet:",
                "no optimizer has been made.",
                "Call train() or create_optimizer(); an override of create_optimizer must set self.optimizer.",
            )
        return self.optimizer
