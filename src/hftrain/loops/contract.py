"""Base class of loops: the stage it runs, unsupported features, and the state saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch

from hftrain.core.errors import ConfigError
from hftrain.core.signatures import Shown

Stage = Literal["fit", "evaluate", "predict"]
Parts = TypeVar("Parts")


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
        unsupported: Feature -> why this loop does not support it; `FEATURES` in `hftrain.extras.own_loops` has their
            names. The Trainer raises before the first step of a run that uses one.
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
