"""DeepSpeed's process-wide state, and the gradient norm of its engine."""

from __future__ import annotations

import importlib
from typing import Any

from hftrain.core.errors import StrategyError


def join_processes(*, device_type: str, backend: str | None) -> None:
    """Make DeepSpeed use the existing process group. Collective.

    Raises:
        StrategyError: DeepSpeed has selected another device type.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    device_name = get_accelerator().device_name()
    if device_name != device_type:
        raise StrategyError(
            f"strategy='deepspeed' was to run on {device_type!r}.",
            f"DeepSpeed chose {device_name!r} when it was imported.",
            f"Set the environment variable DS_ACCELERATOR={device_type} before the start.",
        )
    if device_name == "cpu":
        # Otherwise DeepSpeed compiles shared-memory collectives for minutes at the first start. Gloo is used instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def forget_groups() -> None:
    """Clear DeepSpeed's destroyed process groups, so that another launch does not find them."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    importlib.reload(groups)


class LastNorm:
    """The gradient norm of the last update, read from the engine when it is logged."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __float__(self) -> float:
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)
