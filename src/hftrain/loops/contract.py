"""Base class of loops: the stage it runs, unsupported features, and the state saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.core.log import get_logger
from hftrain.core.registry import Registry
from hftrain.core.signatures import Shown

Stage = Literal["fit", "evaluate", "predict"]
Parts = TypeVar("Parts")

logger = get_logger(__name__)


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


class LoopStates:
    """The states of custom loops, saved by each process.

    A fit loop gets its state when it is attached.
    """

    def __init__(self, loops: Mapping[str, Loop[Any]]) -> None:
        self._loops = loops
        self._waiting: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the states by stage, of loops that have one."""
        ready = {stage: loop for stage, loop in self._loops.items() if stage != "fit" or loop.is_attached}
        states = {stage: loop.state_dict() for stage, loop in ready.items()}
        return {stage: state for stage, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; older checkpoints have none.

        Raises:
            CheckpointError: The checkpoint has the state of a loop that this run does not have.
        """
        for stage, state in states.items():
            loop = self._loops.get(stage)
            if loop is None or not loop.keeps_state:
                if stage == "fit":
                    raise CheckpointError(
                        "Cannot go on from this checkpoint:",
                        "the loop that it was trained with has a state, which this Trainer's loop does not take.",
                        "Pass the same loop=, or start a new run.",
                    )
            elif stage == "fit":
                self._waiting[stage] = state
            else:
                loop.load_state_dict(state)
        for stage, loop in self._loops.items():
            if stage not in states and loop.keeps_state:
                logger.warning("The checkpoint has no state for %s, which starts from scratch.", type(loop).__name__)

    def hand_over(self, loop: Loop[Any]) -> None:
        """Load the state of a loop that was just attached."""
        if loop.stage in self._waiting:
            loop.load_state_dict(self._waiting.pop(loop.stage))


loops: Registry[Loop[Any]] = Registry("loop", group="hftrain.loops", elsewhere={"train": "fit", "eval": "evaluate"})
loops.register("fit", "hftrain.loops.fit:FitLoop", summary="epochs of optimizer steps")
loops.register("evaluate", "hftrain.loops.evaluate:EvaluateLoop", summary="one pass that reduces to metrics")
loops.register("predict", "hftrain.loops.evaluate:PredictLoop", summary="one pass that keeps the predictions")
