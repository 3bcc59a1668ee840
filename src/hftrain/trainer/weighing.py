"""The one place that normalises: a micro-batch's mean loss becomes its share of the step's mean over all items."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hftrain.core.errors import TaskError, explain
from hftrain.core.log import get_logger
from hftrain.core.seed import preserved_rng
from hftrain.core.tree import batch_size_of
from hftrain.task.introspect import takes_item_count
from hftrain.task.model_task import ModelTask

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Count = int | torch.Tensor


class LossShares:
    """Decide once per run whether items are counted and losses weighed, and do it.

    Args:
        trainer: Its task counts the items; its arguments and hooks say who divides.
    """

    def __init__(self, trainer: Trainer) -> None:
        args = trainer.args
        self.trainer = trainer
        self.num_ranks = trainer.strategy.world_size if args.average_tokens_across_devices else 1
        function = trainer.compute_loss_func if callable(trainer.compute_loss_func) else None
        # What an override of compute_loss returns is divided already if it says so, or leaves a mark in the place of
        # the function, as other libraries do.
        says = getattr(trainer, "loss_is_scaled_for_ga", None)
        is_marked = trainer.compute_loss_func is not None and function is None
        self.is_divided = bool(is_marked if says is None else says) and trainer._is_overridden("compute_loss")
        divides = (
            takes_item_count(function)
            if function is not None
            else trainer.model_accepts_loss_kwargs or args.label_smoothing_factor
        )
        self.may_divide = bool(divides and trainer._loss_takes_count and isinstance(trainer.task, ModelTask))
        self.is_on = args.gradient_accumulation_steps > 1 or self.num_ranks > 1
        self._does_divide: bool | None = None
        self._window_samples = 1
        if isinstance(trainer.task, ModelTask):
            trainer.task.accepts_item_count = trainer.model_accepts_loss_kwargs

    def take(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Count | None]:
        """Take a step's micro-batches, and note how many samples they hold for losses that nothing else weighs."""
        taken = self.trainer._slot_get_batch_samples(epoch_iterator, num_batches, device)
        if not isinstance(taken, (tuple, list)) or len(taken) != 2 or not isinstance(taken[0], (list, tuple)):
            raise TaskError(
                explain(
                    "get_batch_samples was called.",
                    f"It returned a {type(taken).__name__} that is no pair of a list of batches and their item count.",
                    "Return (batches, num_items_in_batch); the count may be None, and no batches end the epoch.",
                )
            )
        batches, num_items = taken
        self.trainer.current_gradient_accumulation_steps = len(batches)
        if self.is_on and num_items is None:
            self._window_samples = sum(batch_size_of(batch) or 1 for batch in batches)
        return batches, num_items

    def count(self, batches: list[Any], device: torch.device | None) -> Count | None:
        """Return the items of a step, over all ranks if asked for; None where nobody needs them. Collective."""
        if not batches or not (self.is_on or self.may_divide or self.is_divided):
            return None
        task = self.trainer.task
        needs_labels = self.may_divide or self.is_divided
        if needs_labels and isinstance(task, ModelTask) and not all(map(task.label_key, batches)):
            return None
        num_items: Any = sum(task.count_items(batch) for batch in batches)
        if self.num_ranks > 1:
            num_items = self.trainer.strategy.reduce(torch.as_tensor(num_items, device=device), op="sum")
        return num_items  # type: ignore[no-any-return]

    @staticmethod
    def weigh(loss: torch.Tensor, share: tuple[Any, Any]) -> torch.Tensor:
        """Multiply a loss by its share; one that is a mean over no item (NaN) has none."""
        # In this order, so that the counts take the loss's floating-point type.
        weighed = loss * share[0] / share[1]
        return torch.where(share[0] > 0, weighed, 0.0) if isinstance(share[0], torch.Tensor) else weighed

    def of(self, inputs: Any, num_items: Count | None) -> tuple[Any, Any]:
        """Return the fraction, as numerator and denominator, that a micro-batch's loss is multiplied by.

        DDP averages gradients over ranks: where the count is over all ranks, the fraction takes that back.
        """
        if self.is_divided:
            return 1, 1
        if num_items is None:
            return batch_size_of(inputs) or 1, self._window_samples
        if self.may_divide and self._divides(inputs, num_items):
            return self.num_ranks, 1
        return self.trainer.task.count_items(inputs) * self.num_ranks, num_items

    def _divides(self, inputs: Any, num_items: Count) -> bool:
        """Find out, once per run, whether the loss divides by the item count it is given; collective until known.

        Many transformers models, and many functions, take the count and ignore it: only the loss itself tells. While
        it does not (every rank's is 0 or NaN), it is taken for a mean, as one over no item has to be.
        """
        trainer = self.trainer
        if self._does_divide is None:
            losses = []
            with trainer._evaluating("eval", casts=False), torch.no_grad(), trainer.compute_loss_context_manager():
                for count in (num_items, 2 * num_items):
                    with preserved_rng():
                        # The task's, for a split model is called from outside; a copy, for overrides may pop labels.
                        loss = trainer._slot_compute_loss(trainer.task.model, dict(inputs), num_items_in_batch=count)
                        losses.append(float(loss))
            # A loss of 0 or NaN tells nothing; then another rank or the next micro-batch may.
            tells = math.isfinite(losses[0]) and losses[0] != 0
            verdict = 0 if not tells else 1 if math.isclose(*losses, rel_tol=1e-2) else 2
            device = trainer.strategy.device
            verdict = int(trainer.strategy.reduce(torch.tensor(verdict, device=device), op="max"))
            self._does_divide = None if verdict == 0 else verdict == 2
            if verdict == 1 and trainer.compute_loss_func is not None:
                logger.warning(
                    "compute_loss_func takes num_items_in_batch, but its loss does not change with it: it is taken for "
                    "the mean over a micro-batch's items. A sum must be divided by num_items_in_batch."
                )
        return bool(self._does_divide)
