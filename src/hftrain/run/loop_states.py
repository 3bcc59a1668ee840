"""The states of custom loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger
from hftrain.loops.contract import Loop

logger = get_logger(__name__)


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
