"""A task's loss is checked once against the items that its batches are weighted by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hftrain.core.errors import TaskError
from hftrain.core.types import StepOutput
from hftrain.task.items import LABELS, SAMPLES, SHIFTED
from hftrain.task.module import TaskModule
from hftrain.trainer.proofs import TOLERANCES, label_numbers, means_of

_MOST_LOOKS = 8


class CountItemsCheck:
    """Compare the default `count_items` of a task with what its loss proves to be a mean over.

    It needs a step that returns outputs and labels, and a batch whose samples hold unequal numbers of labels. The first
    such batch decides; reading it waits for the device.

    Args:
        task: Its own `count_items`, if it defines one, is a declaration and not checked.
    """

    def __init__(self, task: TaskModule) -> None:
        self._task = task
        self._num_left = _MOST_LOOKS if type(task).count_items is TaskModule.count_items else 0

    def see(self, output: StepOutput, batch: Any) -> None:
        """Check one batch.

        Raises:
            TaskError: The loss is the mean over other items than those that `count_items` counts.
        """
        if not self._num_left or output.loss is None or not isinstance(output.labels, torch.Tensor):
            return
        self._num_left -= 1
        logits = output.outputs.get("logits") if isinstance(output.outputs, Mapping) else output.outputs
        labels = output.labels
        is_exact = output.loss.dtype.itemsize >= 4
        if not isinstance(logits, torch.Tensor) or not is_exact or len(label_numbers(labels)) < 2:
            return
        loss, tolerance = float(output.loss.detach()), TOLERANCES[output.loss.dtype]
        numbers = {
            kind: num
            for kind, mean, num in means_of(logits.detach(), labels)
            if kind in (LABELS, SHIFTED, SAMPLES) and math.isclose(loss, mean, rel_tol=tolerance)
        }
        if len(numbers) != 1:
            return
        self._num_left = 0
        (kind, number), count = *numbers.items(), int(self._task.count_items(batch))
        if count != number:
            raise TaskError(
                f"Cannot weight the batches of {type(self._task).__name__} by their {count} items.",
                f"Its loss is the mean over {number} {kind.replace('_', ' ')} of this batch, and the default "
                "count_items counts the labels other than -100 of a batch, or its samples.",
                "Override count_items(batch) in the task to return the number of items that the loss averages over.",
            )
