"""Adapt accelerate's loggers and process state, which libraries use before hftrain launches processes."""

from __future__ import annotations

from typing import Any

from hftrain.core.devices import find_device_type
from hftrain.core.launcher import accelerate_state, announce_launch, read_launch


def adapted_log(log: Any) -> Any:
    """Return a version of accelerate's log method that also works before processes are launched.

    The original reads the rank from accelerate's state, and raises without one. transformers' arguments launch when
    they are built; hftrain launches when a run starts, so until then the rank is read from the launcher's environment.
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


def adapted_settings(init: Any) -> Any:
    """Return a version of accelerate's constructor of a run's settings that also works before there is an accelerator.

    Libraries call `AcceleratorState()`, or functions that do, once they have built a Trainer. transformers' Trainer has
    made its accelerator by then; hftrain's makes it on first use, and replaces these settings.
    """

    def adapted(self: Any, *args: Any, **kwargs: Any) -> None:
        if not (args or kwargs or accelerate_state("AcceleratorState")):
            from accelerate.utils import TorchDynamoPlugin

            kwargs = {"dynamo_plugin": TorchDynamoPlugin(), "_from_accelerator": True}
        init(self, *args, **kwargs)

    return adapted


def adapted_init(init: Any) -> Any:
    """Return a version of accelerate's state constructor that also supports several processes on the CPU.

    Libraries call `PartialState()`, and expect the state that transformers' arguments have created. hftrain launches
    when a run starts, so their call is the first. On a machine without accelerators, the original would create a state
    of one process unless `cpu` is set.
    """

    def adapted(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        is_first = not accelerate_state("PartialState")
        if is_first:
            announce_launch()
        init(self, cpu or (is_first and read_launch().world_size > 1 and find_device_type() == "cpu"), **kwargs)

    return adapted
