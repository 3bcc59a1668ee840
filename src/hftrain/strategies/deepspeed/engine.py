"""What DeepSpeed keeps for a whole Python process, and what its engine tells."""

from __future__ import annotations

import importlib
from typing import Any

from hftrain.core.errors import StrategyError


def join_processes(*, device_type: str, backend: str | None) -> None:
    """Let DeepSpeed use the process group that there is. Collective.

    Raises:
        StrategyError: DeepSpeed has chosen another kind of device.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != device_type:
        raise StrategyError(
            f"strategy='deepspeed' was to run on {device_type!r}.",
            f"DeepSpeed chose {found!r} when it was imported.",
            f"Set the environment variable DS_ACCELERATOR={device_type} before the start.",
        )
    if found == "cpu":
        # Or DeepSpeed compiles an exchange through shared memory, for minutes, at the first start. Gloo does it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def forget_groups() -> None:
    """Let DeepSpeed forget the process groups that it made, for another launch would find them, and they are gone."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    importlib.reload(groups)


class LastNorm:
    """The norm of the last update's gradients, asked of the engine when somebody logs it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __float__(self) -> float:
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)
