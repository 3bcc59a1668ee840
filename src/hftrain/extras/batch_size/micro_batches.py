"""`auto_find_batch_size`: make a step fit into memory.

By default the step stays the same: its batches are split into smaller micro-batches whose gradients have the same sum,
so the effective batch, the schedule, the number of steps and the data order do not change. With ``"smaller_batch"``
the run restarts with half the batch size, as documented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
import torch
from torch import nn

from hftrain.checkpoint.state_files import load_trainer_state
from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import get_logger
from hftrain.core.seed import preserved_rng
from hftrain.core.tree import batch_size_of, is_samples, map_tensors, tensors_of
from hftrain.task.metric_state import reset

if TYPE_CHECKING:
    from hftrain.arguments.training import TrainingArguments
    from hftrain.core.signatures import Hooks
    from hftrain.loops.window import LogWindow
    from hftrain.run.parts import TrainerHooks
    from hftrain.trainer.loss_normalization import LossShares

T = TypeVar("T")

logger = get_logger(__name__)


class MicroBatches:
    """Run a batch in micro-batches that fit into memory; replaces the two loop hooks that receive batches.

    The size is searched on the run's first batch, before the first step: a rehearsal runs forward and backward, with
    as much memory reserved as Adam's state takes, and all processes agree on the size. If a later, longer batch runs
    out of memory, it is split further in a run of one process. With several processes the error ends the run, because
    the others do not notice.

    The size is set as `train_batch_size` of the documented state, and so recorded in checkpoints.

    Args:
        logs: The logs of the steps; those of a rehearsal are removed.
        size: Samples per micro-batch, as found by an earlier run; None searches.
    """

    def __init__(
        self, trainer: TrainerHooks, hooks: Hooks, shares: LossShares, logs: LogWindow, size: int | None
    ) -> None:
        self._trainer, self._hooks, self._shares, self._logs, self.size = trainer, hooks, shares, logs, size
        self._finished_batches: list[Any] = []
        if size is not None:
            trainer.state.train_batch_size = size
        # On from the first step, so that every micro-batch can be weighted by its share of the items.
        shares.is_on = True

    def take(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Take a step's batches; see `LossShares.take`."""
        self._finished_batches = []
        return self._shares.take(epoch_iterator, num_batches, device)

    def step(self, model: nn.Module, batch: Any, num_items: Any) -> torch.Tensor:
        """Run forward and backward on a batch in parts; return the detached loss, scaled to its share of the step."""
        if self.size is None:
            self._find_size(model, batch, num_items)
        loss, is_first = None, True
        while loss is None:
            if not is_first:
                self._shrink(batch, f"step {self._trainer.state.global_step}")
                self._trainer.model.zero_grad()
                # zero_grad() also dropped the gradients that this step had accumulated.
                for earlier in self._finished_batches:
                    self._run(model, earlier, num_items)
            loss, is_first = self._try(lambda: self._run(model, batch, num_items)), False
        self._finished_batches.append(batch)
        return loss

    def _find_size(self, model: nn.Module, batch: Any, num_items: Any) -> None:
        """Halve the size until a rehearsal of the step fits on every process; it leaves no trace in logs or metrics."""
        strategy = self._trainer.strategy
        self.size = batch_size_of(batch) or self._trainer.state.train_batch_size or 1
        logs, buffers = self._logs.state_dict(), [(b, b.clone()) for b in self._trainer.task.buffers()]

        def rehearse() -> torch.Tensor:
            _reserve = [
                torch.empty_like(p) for p in self._trainer.model.parameters() if p.requires_grad for _ in range(2)
            ]
            with preserved_rng(), strategy.no_sync(model), self._shares.paused():
                return self._run(model, batch, num_items)

        while True:
            fits = strategy.all_true(self._try(rehearse, is_final=False) is not None)
            self._trainer.model.zero_grad()
            self._logs.load_state_dict(logs, device=strategy.device)
            reset(self._trainer.task.metrics("train"))
            for buffer, value in buffers:
                buffer.copy_(value)
            if fits:
                break
            self._shrink(batch, "the rehearsal of the first step")
        self._trainer.state.train_batch_size = self.size

    def _shrink(self, batch: Any, when: str) -> None:
        assert self.size is not None
        if self.size <= 1:
            raise ConfigError(
                "Cannot use auto_find_batch_size=True.",
                f"Memory ran out in {when} with a single sample per micro-batch.",
                "Use a smaller model, shorter samples, gradient_checkpointing=True or a precision of 16 bits.",
            )
        previous, self.size = self.size, math.ceil(self.size / 2)
        self._trainer.state.train_batch_size = self.size
        logger.warning("Out of memory in %s: micro-batches of %d samples are cut to %d.", when, previous, self.size)

    def _run(self, model: nn.Module, batch: Any, num_items: Any) -> torch.Tensor:
        """Train on the parts of a batch; only the last one may exchange gradients."""
        assert self.size is not None
        step, parts = self._hooks.training_step, split_batch(batch, self.size)
        self._shares.has_weighed = len(parts) == 1
        self._shares.split(batch if len(parts) > 1 else None)
        losses = []
        for part in parts[:-1]:
            with self._trainer.strategy.no_sync(model):
                losses.append(step(model, part, num_items))
        losses.append(step(model, parts[-1], num_items))
        if not self._shares.is_weighed(num_items):
            raise ConfigError(
                "Cannot find a batch size: memory ran out.",
                "The batch is cut into parts, whose losses Trainer.training_step weighs; the training_step of "
                f"{type(self._trainer).__name__} does not call it, so the gradients would be added up unweighed.",
                "Call super().training_step, or set auto_find_batch_size='smaller_batch'.",
            )
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _try(self, run: Callable[[], torch.Tensor], *, is_final: bool = True) -> torch.Tensor | None:
        """Return the loss, or None if memory ran out; nothing of a failed attempt holds memory then."""
        from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

        try:
            return run()
        except RuntimeError as error:
            if not should_reduce_batch_size(error) or (is_final and self._trainer.strategy.world_size > 1):
                raise
        clear_device_cache(garbage_collection=True)
        return None


def split_batch(batch: Any, size: int) -> list[Any]:
    """Split a batch into parts of at most `size` samples; values without a batch dimension are in every part.

    A list of the same length as the batch's tensors, such as a list of names, holds one entry per sample.
    """
    total = batch_size_of(batch)
    if total is None:
        raise TaskError(
            "Cannot use auto_find_batch_size=True.",
            f"A {type(batch).__name__} without tensors cannot be cut into micro-batches.",
            "Give batches of nested tensors, or use auto_find_batch_size='smaller_batch'.",
        )
    if total <= size:
        return [batch]
    if is_samples(batch):
        return [batch[start : start + size] for start in range(0, total, size)]

    def part_from(start: int) -> Any:
        rows = slice(start, start + size)
        part = map_tensors(batch, lambda t: t[rows] if t.dim() and len(t) == total else t)
        if isinstance(batch, Mapping):
            lists = {key: value[rows] for key, value in batch.items() if _is_per_sample(value, total)}
            return {**part, **lists} if lists else part
        if type(batch) in (list, tuple) and any(_is_per_sample(value, total) for value in batch):
            pairs = zip(batch, part, strict=True)
            return type(batch)(value[rows] if _is_per_sample(value, total) else cut for value, cut in pairs)
        return part

    return [part_from(start) for start in range(0, total, size)]


def _is_per_sample(value: Any, total: int) -> bool:
    """Return whether a value that is not a tensor holds one entry for each of `total` samples."""
    if isinstance(value, numpy.ndarray):
        return value.ndim > 0 and len(value) == total
    if not isinstance(value, list) or len(value) != total:
        return False
    return not any(tensor.dim() and len(tensor) == total for tensor in tensors_of(value))


def found_size(args: TrainingArguments, resume: Path | None) -> int | None:
    """Return the micro-batch size that the run to resume has found, or None."""
    if resume is None or not args.auto_find_batch_size:
        return None
    return load_trainer_state(resume).train_batch_size


def with_smaller_batches(trainer: TrainerHooks, run: Callable[[Path | None], T], resume: Path | None) -> T:
    """Run a training, restarting with half the batch size each time memory runs out; the arguments are restored."""
    from accelerate.utils.memory import find_executable_batch_size

    args, strategy, parts = trainer.args, trainer.strategy, (trainer.optimizer, trainer.lr_scheduler)
    configured = args.per_device_train_batch_size
    size: int = strategy.broadcast_object(found_size(args, resume)) or args.train_batch_size
    size //= max(args.train_batch_size // configured, 1)

    def halve() -> int:
        nonlocal size
        size //= 2
        logger.warning("Out of memory: the run starts again with %d samples per device and batch.", size)
        return size

    def attempt(batch_size: int) -> T:
        args.per_device_train_batch_size = batch_size
        trainer.optimizer, trainer.lr_scheduler = parts
        return run(resume)

    try:
        # Not as a decorator: accelerate before 1.15 then ignores the reduction function.
        return find_executable_batch_size(attempt, size, halve)()  # type: ignore[no-any-return]
    finally:
        args.per_device_train_batch_size = configured
