"""The state of a task without that of its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hftrain.task.module import TaskModule


def task_state(task: TaskModule) -> dict[str, torch.Tensor]:
    """Return what the task itself holds next to its model."""
    with without_model(task):
        return task.state_dict()


@contextmanager
def without_model(task: TaskModule) -> Iterator[TaskModule]:
    """Take the model out for a while: its state may be in pieces, and reading it a thing for all processes."""
    model = task.model
    del task.model
    try:
        yield task
    finally:
        task.model = model
