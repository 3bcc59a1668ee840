"""The base class of user-defined tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import TaskError
from hftrain.core.tree import batch_size_of
from hftrain.core.types import StepOutput
from hftrain.task.items import count_labels


class _FromState:
    """An attribute of tasks that reads the Trainer's state."""

    def __init__(self, name: str, initial: float) -> None:
        self._name, self._initial = name, initial

    def __get__(self, task: Any, owner: Any = None) -> Any:
        return self if task is None else getattr(task.run_state, self._name, None) or self._initial


class TaskModule(nn.Module):
    """Base class of tasks: holds the model, the loss and the metrics.

    The strategy wraps only `model`: put every trainable parameter inside it. Steps return their results. To use
    torchmetrics metrics, make them children of the task and update them in `evaluation_step`. The evaluation loop
    computes them once per evaluation (synchronised across ranks by torchmetrics) and resets them.

    Args:
        model: The network; may also be assigned to `self.model` after ``super().__init__()``.

    Attributes:
        automatic_optimization: False: `training_step` steps the optimizers itself, with
            ``self.optimizers["name"].minimize(loss)``, and returns a loss for the logs.
        step: The optimizer steps taken so far, as `state.global_step`; 0 before a training.
        epoch: The passes over the data so far, a float as in the logs.

    Example:
        >>> class Regression(TaskModule):
        ...     def training_step(self, batch):
        ...         inputs, targets = batch
        ...         return torch.nn.functional.mse_loss(self.model(inputs), targets)
        >>> task = Regression(nn.Linear(2, 1))
        >>> task.training_step((torch.zeros(4, 2), torch.zeros(4, 1))).shape
        torch.Size([])
    """

    model: nn.Module
    automatic_optimization: bool = True
    # With `automatic_optimization = False`, in a training: the optimizers by name.
    optimizers: Any
    run_state: Any = None  # of the Trainer that trains or evaluates the task
    step: int = _FromState("global_step", 0)  # type: ignore[assignment]
    epoch: float = _FromState("epoch", 0.0)  # type: ignore[assignment]

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        if model is not None:
            self.model = model

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            if "_modules" in vars(self):
                raise
            raise TaskError(
                f"Cannot set {type(self).__name__}.{name}:",
                "its __init__ has not called that of its base class.",
                "Call super().__init__() in its first line.",
            ) from error

    def training_step(self, batch: Any) -> StepOutput | torch.Tensor:
        """Return the mean loss over the batch's items, alone or inside a `StepOutput`.

        Args:
            batch: The collated batch, already on the device.

        Raises:
            TaskError: The subclass does not implement this method.
        """
        raise TaskError(
            f"Cannot run a training step of {type(self).__name__}.",
            "It does not define training_step(batch).",
            "Define it and return the loss, or a StepOutput with the loss in it.",
        )

    def evaluation_step(self, batch: Any) -> StepOutput | torch.Tensor:
        """Return the loss (and outputs, labels) of one evaluation batch; called without gradients.

        By default, run `training_step`.
        """
        return self.training_step(batch)

    def prediction_step(self, batch: Any) -> Any:
        """Return the predictions of one batch: a tensor or nested tensors, samples first; called without gradients.

        The default returns the `outputs` of `evaluation_step`.

        Raises:
            TaskError: `evaluation_step` returns no outputs.
        """
        outputs = as_step_output(self.evaluation_step(batch), step=f"{type(self).__name__}.evaluation_step").outputs
        if outputs is None:
            raise TaskError(
                f"Cannot predict with {type(self).__name__}.",
                "It defines no prediction_step, and its evaluation_step returns no outputs.",
                "Define prediction_step(batch), or return StepOutput(outputs=...) from evaluation_step.",
            )
        return outputs

    def configure_optimizers(self) -> Any:
        """Return an optimizer or an (optimizer, schedule) pair; None (the default) uses those of the arguments.

        The schedule is stepped once per optimizer update. Several optimizers are returned by name, and step together
        unless `automatic_optimization` is False: ``{"generator": optimizer, "critic": (optimizer, schedule)}``. A
        schedule may have another interval: ``{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule,
        "interval": "epoch"}}``; one that reads a metric is stepped after evaluations: ``"monitor": "loss"``.
        """
        return None

    def parallelize(self, mesh: Any) -> Mapping[str, Any] | None:
        """Say how tensor ranks share the layers of `model`; called by the strategy ``"mesh"`` before it shards.

        Args:
            mesh: Their one-dimensional `DeviceMesh`.

        Returns:
            Styles (``"colwise"``, ``"rowwise"``, ...) by the names of the model's modules, in which ``*`` stands for
            one part of a name; what is not named is held whole by each rank. None, the default, uses the model's own
            plan (`tp_plan`).

        Example:
            >>> class Blocks(TaskModule):
            ...     def parallelize(self, mesh):
            ...         return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        """
        return None

    def count_items(self, batch: Any) -> int | torch.Tensor:
        """Return the number of items the batch's loss averages over: the weight of the batch within a step.

        The default counts integer `labels` other than -100 of a mapping, else the samples. Override it where the loss
        averages over something else. Must not synchronise: return a count that is on the device as a 0-d tensor.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            return count_labels(labels)
        size = batch_size_of(batch)
        if size is None:
            raise TaskError(
                f"{type(self).__name__} cannot count the items of a batch of type {type(batch).__name__}.",
                "The batch holds no tensor with a batch dimension.",
                "Override count_items(batch) in the task.",
            )
        return size

    def metrics(self, stage: str) -> Mapping[str, Any]:
        """Return the metrics to compute at the end of a stage and then to reset, by name.

        Args:
            stage: ``"train"`` (read with each log) or ``"eval"``.

        Returns:
            By default every child but `model` that has `update`, `compute` and `reset` (torchmetrics' protocol), those
            in an `nn.ModuleDict` or `nn.ModuleList` as ``<child>_<key>``, and nothing for ``"train"``.
        """
        return {} if stage == "train" else dict(_metrics_in(self.named_children()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)


def know_state(task: TaskModule, state: Any) -> None:
    """Let a task read its step and epoch from a state; raise if it has something of its own under these names."""
    if taken_names := {*vars(task), *dict(task.named_children())} & {"step", "epoch"}:
        raise TaskError(
            f"Cannot use the attribute {min(taken_names)!r} of {type(task).__name__}.",
            "self.step and self.epoch are the optimizer steps and epochs of the training.",
            "Read them, and give what you set another name.",
        )
    task.run_state = state


def check_defined(task: TaskModule, *steps: str) -> None:
    """Raise if a task defines none of some steps: from deep in a loop, the traceback would be long."""
    if all(name not in vars(task) and getattr(type(task), name) is getattr(TaskModule, name) for name in steps):
        task.training_step(None)


def checked_count(count: Any, function: Any) -> int | torch.Tensor:
    """Return the item count that a user's function returned for a batch, or raise if it is not a count."""
    if not isinstance(count, (int, torch.Tensor, Real)):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TaskError(
            f"Cannot weigh a batch by {count!r}, which {name} returned.",
            "The loss of a batch is weighted by the number of items that it is a mean over.",
            "Return their number, as an int or a 0-d tensor.",
        )
    return count  # type: ignore[return-value]


def _metrics_in(children: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in children:
        # A MetricCollection is an nn.ModuleDict too.
        if name != "model" and all(hasattr(child, method) for method in ("update", "compute", "reset")):
            yield name, child
        elif isinstance(child, (nn.ModuleDict, nn.ModuleList)):
            yield from ((f"{name}_{key}", metric) for key, metric in _metrics_in(child.named_children()))


def as_step_output(result: Any, *, step: str = "the step") -> StepOutput:
    """Turn the return value of a step into a `StepOutput`.

    Args:
        step: The name of the step, for the error.

    Raises:
        TaskError: The value holds no loss.
    """
    if isinstance(result, StepOutput):
        return result
    if isinstance(result, torch.Tensor):
        return StepOutput(loss=result)
    raise TaskError(
        f"Cannot use what {step} returned:",
        f"it is {_describe(result)}, and a loss is a tensor.",
        _REMEDIES.get(type(result).__name__, "Return the loss tensor or StepOutput(loss=...)."),
    )


_REMEDIES = {
    "NoneType": "End the step with return loss, or return StepOutput(loss=...).",
    "coroutine": "Define the step with def, not async def.",
    "dict": "Return StepOutput(loss=..., logs={...}); outputs and labels have names of their own.",
    "float": "Return the loss tensor itself, without item() or float().",
    "generator": "Write return, not yield.",
    "ndarray": "Return the loss tensor itself, without numpy().",
    "tuple": "Return StepOutput(loss=..., outputs=..., labels=..., logs={...}).",
}


def _describe(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"of type {type(result).__name__} with the keys {', '.join(sorted(map(str, result)))}"
    return "None" if result is None else f"of type {type(result).__name__}"


def task_state(task: TaskModule) -> dict[str, torch.Tensor]:
    """Return the task's own state, without that of its model."""
    with without_model(task):
        return task.state_dict()


@contextmanager
def without_model(task: TaskModule) -> Iterator[TaskModule]:
    """Detach the model temporarily: its state may be sharded, and reading it may be collective."""
    model = task.model
    del task.model
    try:
        yield task
    finally:
        task.model = model
