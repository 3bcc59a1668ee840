"""Types shared by packages: results of tasks and runs, and the precision settings that a strategy sees."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class StepOutput:
    """Results of a task's step: loss, outputs, labels and values to log.

    Args:
        loss: The mean loss over the batch's items: a 0-d tensor with its graph, or None.
        outputs: The model outputs; kept only if predictions are requested.
        labels: The targets of `outputs`, kept in the same cases.
        logs: Values to average over the steps of the logging window (training) or the samples (evaluation).
    """

    loss: torch.Tensor | None = None
    outputs: Any = None
    labels: Any = None
    logs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """The precision settings that a strategy sees.

    Args:
        compute_dtype: The dtype of matrix products.
        reduce_dtype: The dtype in which gradients are reduced.
        loss_scaling: Whether a gradient scaler is used.
        autocast: Whether autocast chooses the dtype of each operation.
        matmul: ``"highest"`` or ``"high"`` (TF32), None to leave torch's setting.
    """

    name: str
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    loss_scaling: bool = False
    autocast: bool = False
    matmul: str | None = None


class Owns(enum.Flag):
    """The parts of a step that a strategy's own engine takes over."""

    NOTHING = 0
    BACKWARD = enum.auto()
    STEP = enum.auto()
    CLIP = enum.auto()
    SCALING = enum.auto()
    ACCUMULATION = enum.auto()
    CASTING = enum.auto()


class Shard(NamedTuple):
    """One process's block of a tensor that is split along any of its dimensions.

    Args:
        block: The block; the whole tensor if `offsets` is None.
        offsets: The index of the block's first element in each dimension of the whole tensor.
        shape: The shape of the whole tensor.
    """

    block: torch.Tensor
    offsets: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()


class StoredTensor(ABC):
    """A tensor in files, read on demand; `hftrain.storage.shards` makes them."""

    shape: torch.Size

    @abstractmethod
    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the block at `offsets` with the shape `sizes` on the CPU; without them, the whole tensor.

        Raises:
            CheckpointError: A file is damaged.
        """


class EvalPrediction:
    """Predictions and labels as `compute_metrics` receives them; unpacks into the parts that are present.

    Source: the documented `EvalPrediction`.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses

    def _parts(self) -> tuple[Any, ...]:
        parts = [self.predictions, self.label_ids]
        parts += [part for part in (self.inputs, self.losses) if part is not None]
        return tuple(parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts())

    def __getitem__(self, index: int) -> Any:
        return self._parts()[index]


class EvalLoopOutput(NamedTuple):
    """Results of one pass over an evaluation set. Source: the documented `EvalLoopOutput`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """Return value of `Trainer.predict`. Source: the documented `PredictionOutput`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]


class TrainOutput(NamedTuple):
    """Return value of `Trainer.train`. Source: the documented `TrainOutput`."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The best trial of a hyperparameter search.

    Args:
        run_id: The backend's identifier of the trial; for Optuna the trial's number as a string.
        objective: The trial's objective; a list for several objectives.
        run_summary: Ray Tune's `ExperimentAnalysis`; None with the other backends.

    Source: the documented `BestRun`.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


class HPSearchBackend(str, enum.Enum):
    """The documented names of search backends. Source: the documented `HPSearchBackend`."""

    OPTUNA = "optuna"
    RAY = "ray"
    SIGOPT = "sigopt"
    WANDB = "wandb"
