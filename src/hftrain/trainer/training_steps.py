"""What a Trainer's documented step works with: the weights of its losses, the training mode, and casting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.state_files import Entry
from hftrain.core.extras import extra
from hftrain.core.launcher import tell_accelerate_sync
from hftrain.core.signatures import Hooks, accepts
from hftrain.core.types import Owns
from hftrain.loops.window import LogWindow
from hftrain.run.parts import Take, TrainerHooks, TrainerPart
from hftrain.step.stepper import StepCalls
from hftrain.task.introspect import base_model
from hftrain.task.model_call import ModelCall
from hftrain.task.model_task import ModelTask
from hftrain.task.modes import TrainingMode
from hftrain.trainer.loss_kinds import CountItemsCheck, LossHooks
from hftrain.trainer.loss_normalization import LossShares


class TrainingSteps(TrainerPart):
    """Own what the documented methods of a step share.

    Attributes:
        shares: Weigh the losses that the present hooks compute.
        items_check: Notices a task that does not count the items of its loss.
        computing: The current settings of forward and backward passes.
        mode: Keeps the model in training mode during a run; None between runs.
        cast: The call of a model that runs under autocast itself, until the end of the documented method.
    """

    shares: LossShares
    items_check: CountItemsCheck

    def __init__(self, trainer: TrainerHooks, hooks: Hooks, computing: StepCalls) -> None:
        super().__init__(trainer, hooks)
        self.computing = computing
        self.mode: TrainingMode | None = None
        self.cast: ModelCall | None = None

    def resolve(self) -> None:
        """Inspect the hooks, and weigh losses as the present ones need it."""
        self._hooks.resolve()
        former_shares: LossShares | None = vars(self).get("shares")
        self.shares = self._make_shares()
        if former_shares is not None:
            self.shares.rule.inherit(former_shares.rule)

    def begin(self) -> dict[str, Entry]:
        """Begin the steps of a run; return what the manifest records of them."""
        trainer = self._trainer
        self.shares, self.mode = self._make_shares(), TrainingMode(trainer.task, trainer.optimizer)
        return {"loss rule": self.shares.rule.entry}

    def functions(
        self, resume: Path | None, logs: LogWindow
    ) -> tuple[Take, Callable[[nn.Module, Any, Any], torch.Tensor]]:
        """Return the functions that take a step's batches and train on one; both split batches if set to."""
        trainer, step, shares = self._trainer, self._hooks.training_step, self.shares
        optimizer: Any = trainer.optimizer
        if hasattr(optimizer, "stepping"):  # see `has_own_steps`
            return shares.take, optimizer.stepping(step, shares.weighing)
        if trainer.args.auto_find_batch_size is not True:
            return shares.take, step
        smaller_batches = extra("smaller_batches")
        size = smaller_batches.found_size(trainer.args, resume)
        micro_batches = smaller_batches.MicroBatches(trainer, self._hooks, shares, logs, size)
        return micro_batches.take, micro_batches.step

    def end(self) -> None:
        """Undo `begin`; safe to call twice."""
        if self.mode is not None:
            self.mode.close()
            self.mode = None
        self.mark_sync(True)

    def mark_sync(self, syncs: bool) -> None:
        """Record whether an update follows the next micro-step, also in the accelerator if there is one."""
        self.computing.syncs = syncs
        if self.computing.accelerator is not None:
            tell_accelerate_sync(self.computing.accelerator, syncs)

    def cast_model(self) -> None:
        """Make the model run under autocast, and the code around it in float32, if user code computes a loss.

        Such code then gets float32 outputs, and its operations are not cast, as with transformers' Trainer. Otherwise
        the whole step is cast, which copies no outputs.
        """
        trainer, strategy, computing = self._trainer, self._trainer.strategy, self.computing
        casts = trainer.precision.policy.autocast and Owns.CASTING not in strategy.owns
        # Copies on several devices call the original's forward pass.
        is_copied = getattr(strategy, "num_devices", 1) > 1
        if not casts or is_copied or self._hooks.makes_contexts or not isinstance(trainer.task, ModelTask):
            return
        is_users = self._hooks.is_users("compute_loss", "training_step", "prediction_step")
        if is_users or callable(trainer.compute_loss_func):
            self.cast = ModelCall.of(trainer.model)
            self.cast.set(autocast=lambda: computing.autocast())

    def stop_observing(self) -> None:
        """Give the model its own call back, without autocast and observers."""
        if self.shares.rule.watch is not None:
            self.shares.rule.watch.close()
        if self.cast is not None:
            self.cast.set(autocast=None)
        self.cast = None

    def _make_shares(self) -> LossShares:
        """Return a `LossShares` for the current hooks; sets in the task what they declare of the model."""
        trainer, hooks, task = self._trainer, self._hooks, self._trainer.task
        accepts_count, is_causal = bool(trainer.model_accepts_loss_kwargs), False
        if isinstance(task, ModelTask):
            is_causal = task.is_causal = task.is_causal or hooks.loss_shifts_labels
            task.accepts_item_count = accepts_count
        overrides_loss, override = hooks.is_overridden("compute_loss"), f"{type(trainer).__name__}.compute_loss"
        loss_function = "" if trainer.compute_loss_func is None else "compute_loss_func"
        # FSDP puts its name before that of the model's class.
        model_name = type(trainer.strategy.unwrap(trainer.model)).__name__.removeprefix("FSDP")
        name = "model_accepts_loss_kwargs"
        loss_hooks = LossHooks(
            maker=override if overrides_loss else loss_function or model_name,
            compute_loss_func=trainer.compute_loss_func,
            overrides_loss=overrides_loss,
            accepts_count=accepts_count,
            is_declared=name in vars(trainer) or not isinstance(getattr(type(trainer), name), property),
            is_trusted=getattr(base_model(trainer.model), "accepts_loss_kwargs", None) is True or is_causal,
            divided_for_step=getattr(trainer, "loss_is_scaled_for_ga", None),
            loss_takes_count=accepts(trainer.compute_loss, "num_items_in_batch"),
            shifts_labels=hooks.loss_shifts_labels,
            get_batch_samples=hooks.get_batch_samples,
        )
        return LossShares(trainer.args, trainer.strategy, task, loss_hooks)
