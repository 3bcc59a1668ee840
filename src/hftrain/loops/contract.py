"""Base class of loops: the stage it runs, unsupported features, and the state saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch

from hftrain.core.errors import ConfigError, check_known
from hftrain.core.signatures import Shown

Stage = Literal["fit", "evaluate", "predict"]
Parts = TypeVar("Parts")

# Features that a loop may not support, and what to do instead.
FEATURES = {
    "accelerator": "Do not use trainer.accelerator, or run one process.",
    "accumulation": "Set gradient_accumulation_steps=1.",
    "auto_find_batch_size": "Leave auto_find_batch_size out and set per_device_train_batch_size.",
    "batch_eval_metrics": "Set batch_eval_metrics=False.",
    "engines": "Use a strategy without an engine of its own, such as 'ddp' or 'fsdp'.",
    "loss_scaling": "Use precision='bf16' or '32'.",
    "ranks": "Run one process.",
    "reshaping": "Resume with the number of processes and the batch sizes of the checkpoint.",
    "resume": "Start a new run: leave resume_from_checkpoint out.",
    "saving": "Set save_strategy='no'.",
    "sharded_models": "Use a strategy that keeps the model whole, such as 'ddp'.",
    "signals": "Pass save_policy=SavePolicy(on_signal=False), without every_s.",
    "streams": "Pass a dataset that has a length and no override of its data loader.",
}


class Group(Protocol):
    """The collectives that gathering needs; every rank must call them."""

    world_size: int

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def device(self) -> torch.device:
        """The device on which tensors are exchanged."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's rows."""

    def gather_object(self, value: Any) -> list[Any]:
        """Return every rank's plain data."""

    def reduce(self, tensor: torch.Tensor, op: Literal["sum", "mean", "max"] = "sum") -> torch.Tensor:
        """Return the sum, mean or maximum over ranks."""


class Loop(Shown, Generic[Parts]):
    """Base class of loops: run one stage of a Trainer. Constructors take options; `attach` sets the run's parts.

    Attributes:
        stage: ``"fit"``, ``"evaluate"`` or ``"predict"``.
        unsupported: Feature (a name in `FEATURES`) -> why this loop does not support it. The Trainer raises before the
            first step of a run that uses one.
        parts: The parts of the run, set from `attach` to `detach`.
    """

    stage: ClassVar[Stage]
    unsupported: ClassVar[Mapping[str, str]] = {}
    parts: Parts

    def attach(self, parts: Parts) -> None:
        """Set the parts of a run before it starts, and reset the state of the previous run.

        Raises:
            ConfigError: The loop is running already.
        """
        if self.is_attached:
            raise ConfigError(
                f"Cannot start {type(self).__name__} while it runs:",
                "a loop holds one run at a time.",
                "Give each Trainer a loop of its own, and do not evaluate within an evaluation.",
            )
        self.parts = parts

    def detach(self) -> None:
        """Release the run's parts; safe to call twice."""
        vars(self).pop("parts", None)

    @property
    def is_attached(self) -> bool:
        """Whether a run is in progress."""
        return "parts" in vars(self)

    @property
    def keeps_state(self) -> bool:
        """Whether a subclass saves a state in checkpoints."""
        return type(self).load_state_dict is not Loop.load_state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return this process's state for checkpoints: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`; a fit loop is already attached."""


def check_features(loop: Loop[Any], used: Mapping[str, str]) -> None:
    """Raise if a run uses features that its loop does not support.

    Args:
        loop: Any loop.
        used: The features in use, each with the setting that selects it.

    Raises:
        ConfigError: A feature is not supported; the message gives the loop's reason and the remedy.
    """
    for feature, reason in loop.unsupported.items():
        asked = f"Cannot read {type(loop).__name__}.unsupported:"
        check_known(feature, FEATURES, asked, f"there is no feature {feature!r}.")
        if feature in used:
            asked = f"Cannot use {used[feature]} with the loop {type(loop).__name__}:"
            raise ConfigError(asked, f"{reason.rstrip('.')}.", FEATURES[feature])
