"""Processes, placement and wrapping: where the model lives and how its copies agree. Knows precision by policy only.

The package is the public name `hftrain.strategies`: it has the functions of the registry of strategies, such as
`register`, and their classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hftrain.core.lazy import lazy_names
from hftrain.strategies.registry import strategies

if TYPE_CHECKING:
    from hftrain.strategies.base import Strategy
    from hftrain.strategies.data_parallel import DataParallelStrategy
    from hftrain.strategies.ddp import DDPStrategy
    from hftrain.strategies.deepspeed import DeepSpeedStrategy
    from hftrain.strategies.fsdp import FSDP1Strategy, FSDPStrategy
    from hftrain.strategies.single import MPSStrategy, SingleDeviceStrategy
    from hftrain.strategies.xla import XLAStrategy

_HOMES = {
    "hftrain.strategies.base": ("Strategy",),
    "hftrain.strategies.data_parallel": ("DataParallelStrategy",),
    "hftrain.strategies.ddp": ("DDPStrategy",),
    "hftrain.strategies.deepspeed": ("DeepSpeedStrategy",),
    "hftrain.strategies.fsdp": ("FSDP1Strategy", "FSDPStrategy"),
    "hftrain.strategies.single": ("MPSStrategy", "SingleDeviceStrategy"),
    "hftrain.strategies.xla": ("XLAStrategy",),
}

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "DeepSpeedStrategy",
    "FSDP1Strategy",
    "FSDPStrategy",
    "MPSStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "XLAStrategy",
    "create",
    "names",
    "register",
    "resolve",
    "summary",
]

register, names, summary = strategies.register, strategies.names, strategies.summary
resolve, create = strategies.resolve, strategies.create

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
