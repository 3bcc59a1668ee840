"""Compute the loss of each sample of an observed step alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.core.parameters import is_partitioned
from hftrain.core.seed import capture_rng, restore_rng
from hftrain.core.signatures import Hooks, taking
from hftrain.core.tree import batch_size_of, is_samples, map_tensors, tensors_of
from hftrain.core.types import Owns
from hftrain.extras.batch_size.micro_batches import split_batch
from hftrain.extras.flight.observing import Observer, own_part
from hftrain.run.parts import TrainerHooks


class SampleObserver(Observer):
    """Observe a step, and then compute the loss of each of its samples alone, and the norm of its gradient.

    The step itself is as without it: what it changes is put back afterwards, and `compute_loss` is called with each
    sample, weights, buffers and random numbers from before the step, and the step's item count. Batch normalization
    uses its running statistics. All processes make as many calls. Sharded weights and engines have no norms.

    ``samples-rank0.json`` has ``samples`` (by micro-batch and row; null for a batch that cannot be divided) and
    ``problem``, which says why there are none.
    """

    def __init__(self, step: int, folder: Path, trainer: TrainerHooks) -> None:
        super().__init__(step, folder)
        self._trainer, self._hooks = trainer, Hooks(trainer, dict)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the step changes."""
        super().on_step_begin(args, state, control, **kwargs)
        if self._is_on and not is_partitioned(task := self._trainer.task):
            tensors = [*task.named_parameters(), *task.named_buffers()]
            self._before = {name: own_part(each).to("cpu", copy=True) for name, each in tensors}
            self._random = capture_rng()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the step and its samples, and end the run."""
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == self.step:
            control.should_log = control.should_evaluate = control.should_save = False
            samples, problem = self._compute()
            path = self.folder / f"samples-rank{args.process_index}.json"
            path.write_text(json.dumps({"samples": samples, "problem": problem}, indent=1), encoding="utf-8")

    def _compute(self) -> tuple[list[dict[str, Any]], str | None]:
        task, strategy, found = self._trainer.task, self._trainer.strategy, []
        if is_partitioned(task) or not task.automatic_optimization:
            return [], f"{type(task).__name__} steps its optimizers itself, or ZeRO-3 has split its weights."
        rows = [(number, *row) for number, batch in enumerate(self.batches) for row in _rows_of(batch)]
        self._put_back(task.named_parameters())
        for module in task.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
                module.eval()
        try:
            for place in range(max(strategy.gather_object(len(rows)))):
                number, row, batch = rows[min(place, len(rows) - 1)]
                loss, norm = self._compute_one(batch, self.num_items[number])
                found.append({"micro_batch": number, "row": row, "loss": loss, "norm": norm})
        except Exception as error:
            if strategy.world_size > 1:  # the others wait for this process
                raise
            return [], f"A sample alone cannot be computed: {type(error).__name__}: {error}"
        return found[: len(rows)], None

    def _compute_one(self, batch: Any, num_items: Any) -> tuple[float, float | None]:
        trainer, model = self._trainer, self.parts.model
        self._put_back(trainer.task.named_buffers())
        restore_rng(self._random)
        with self.parts.no_sync(model):
            inputs = self._hooks.prepare_inputs(map_tensors(batch, torch.Tensor.clone))
            with trainer.compute_loss_context_manager():
                compute_loss = taking(trainer.compute_loss, 3, "num_items_in_batch")
                loss = compute_loss(model, inputs, num_items_in_batch=num_items)
            if trainer.strategy.shards_model or Owns.BACKWARD in trainer.strategy.owns:
                return float(loss.detach()), None
            scale = 1024.0 if trainer.precision.policy.loss_scaling else 1.0  # small gradients are 0 in fp16
            (loss * scale).backward()
        gradients = [each.grad.float() for each in trainer.task.parameters() if each.grad is not None]
        trainer.task.zero_grad()
        return float(loss.detach()), math.hypot(*(float(each.norm()) for each in gradients)) / scale

    @torch.no_grad()
    def _put_back(self, named: Any) -> None:
        for name, tensor in named:
            if name in self._before:
                own_part(tensor).copy_(self._before[name])


def _rows_of(batch: Any) -> list[tuple[int | None, Any]]:
    """Return the samples of a batch with their places; the whole batch if its tensors are not as long as each other."""
    size = batch_size_of(batch)
    is_even = is_samples(batch) or all(not each.dim() or len(each) == size for each in tensors_of(batch))
    return list(enumerate(split_batch(batch, 1))) if size and is_even else [(None, batch)]
