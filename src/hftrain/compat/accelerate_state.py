"""What clients ask accelerate for before anything is launched: its loggers, and its state of the processes."""

from __future__ import annotations

from typing import Any

from hftrain.core.accelerate_state import accelerate_state
from hftrain.core.launcher import announce_launch, read_launch
from hftrain.strategies.environment import find_device_type


def adapted_log(log: Any) -> Any:
    """Return accelerate's method that logs, for processes that are not launched yet too.

    It asks accelerate's state for the rank, and raises without one. transformers' arguments launch when they are built;
    hftrain launches when a run starts, so until then the launcher's environment tells the rank.
    """

    def adapted(self: Any, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        if accelerate_state("PartialState"):
            log(self, level, msg, *args, **kwargs)
            return
        main_only = kwargs.pop("main_process_only", True)
        kwargs.pop("in_order", None)
        kwargs.setdefault("stacklevel", 2)
        if self.isEnabledFor(level) and (not main_only or read_launch().rank == 0):
            msg, kwargs = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **kwargs)

    return adapted


def adapted_init(init: Any) -> Any:
    """Return accelerate's method that makes its state, for several processes on the CPU too.

    Clients call `PartialState()`, and find the state that transformers' arguments have made. hftrain launches when a
    run starts, so theirs is the first call. On a machine without accelerators it would make a state of one process,
    unless it is told that the CPU is meant.
    """

    def adapted(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        is_first = not self._shared_state
        if is_first:
            announce_launch()
        init(self, cpu or (is_first and read_launch().world_size > 1 and find_device_type() == "cpu"), **kwargs)

    return adapted
