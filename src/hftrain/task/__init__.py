"""Tasks: a task owns the model, the loss and the metrics."""

from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, as_step_output

__all__ = ["ModelTask", "TaskModule", "as_step_output"]
