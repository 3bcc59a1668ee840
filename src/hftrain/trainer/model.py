"""A Trainer's model: adopted or built, with the documented properties that are detected of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.core.hooks import Hooks
from hftrain.core.log import get_logger
from hftrain.core.seed import set_seed
from hftrain.core.signatures import takes_trial
from hftrain.data.columns import signature_columns
from hftrain.evaluation.configured import align_special_tokens
from hftrain.rules.optimizer import check_optimizer
from hftrain.rules.task import check_not_lightning, check_task
from hftrain.run.parts import TrainerHooks, TrainerPart
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

    Args:
        on_adopted: Called when the Trainer has another model.

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
        plain = task if isinstance(task, ModelTask) else None
        self.accepts_count = plain is not None and plain.accepts_item_count
        shifts = counts_shifted_labels() and loss_shifts_labels(base_model(trainer.model))
        self.find("label_names", list(plain.label_names) if plain else ["labels"])
        self.find("can_return_loss", plain.can_return_loss if plain else False)
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

    def rebuild(self) -> nn.Module:
        """Return the bare model, built again and adopted if there is a `model_init`."""
        trainer = self._trainer
        if trainer.model_init is not None:
            set_seed(trainer.args.seed)
            with trainer.strategy.building():
                self.adopt(trainer.call_model_init(self._hooks.trial))
            trainer.optimizer = trainer.lr_scheduler = None
        return trainer.model


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
