"""What DeepSpeed keeps for a whole Python process, and what its engine tells."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from hftrain.core.errors import ConfigError, StrategyError, explain
from hftrain.strategies.deepspeed.config import find


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
            explain(
                f"strategy='deepspeed' was to run on {device_type!r}.",
                f"DeepSpeed chose {found!r} when it was imported.",
                f"Set the environment variable DS_ACCELERATOR={device_type} before the start.",
            )
        )
    if found == "cpu":
        # Or DeepSpeed compiles an exchange through shared memory, for minutes, at the first start. Gloo does it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def check_nvme(config: Mapping[str, Any]) -> None:
    """Raise where a config offloads to NVMe and DeepSpeed cannot; asks it whether it could compile what it takes.

    Raises:
        ConfigError: There is no path, or no libaio.
    """
    parts = [part for part in ("offload_optimizer", "offload_param") if _offloads_to_nvme(config, part)]
    if not parts:
        return
    reason, remedy = None, ""
    if not all(find(config, f"zero_optimization.{part}.nvme_path") for part in parts):
        reason, remedy = "Nothing says where.", "Set nvme_path beside the device, to a folder on the drive."
    else:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            reason = "DeepSpeed reads and writes there through libaio, and does not find it or its headers."
            remedy = "Install libaio (Debian: libaio-dev), or offload to the CPU."
    if reason:
        asked = f"A DeepSpeed config with device='nvme' in {' and '.join(parts)} was given."
        raise ConfigError(explain(asked, reason, remedy))


def _offloads_to_nvme(config: Mapping[str, Any], part: str) -> bool:
    return bool(find(config, f"zero_optimization.{part}.device") == "nvme")


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
