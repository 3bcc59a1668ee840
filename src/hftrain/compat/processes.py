"""accelerate's state of the processes, which clients ask for before anything is launched."""

from __future__ import annotations

from typing import Any

from hftrain.strategies.environment import find_device_type, launched_world_size


def adapted_init(init: Any) -> Any:
    """Return accelerate's method that makes its state, for several processes on the CPU too.

    Clients call `PartialState()`, and find the state that transformers' arguments have made. hftrain launches when a
    run starts, so theirs is the first call. On a machine without accelerators it would make a state of one process,
    unless it is told that the CPU is meant.
    """

    def adapted(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        is_first = not self._shared_state
        init(self, cpu or (is_first and launched_world_size() > 1 and find_device_type() == "cpu"), **kwargs)

    return adapted
