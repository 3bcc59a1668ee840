"""One process, one device."""

from __future__ import annotations

import torch

from hftrain.core.devices import find_device_type
from hftrain.core.errors import ConfigError
from hftrain.core.launcher import read_launch
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """Train in one process, on the CPU or one accelerator.

    Args:
        use_cpu: Use the CPU even if there is an accelerator.
        device: A device by name (``"cuda:1"``); None uses torch's accelerator, if there is one.
        place_model: Whether `setup` moves the model; False for a model that is already dispatched or quantized.

    Raises:
        ConfigError: A launcher started several processes, the device does not exist, or it contradicts `use_cpu`.

    Example:
        >>> SingleDeviceStrategy(use_cpu=True).device_type
        'cpu'
    """

    name = "single"

    def __init__(
        self, *, use_cpu: bool = False, device: str | torch.device | None = None, place_model: bool = True
    ) -> None:
        if read_launch().world_size > 1:
            raise ConfigError(
                "Cannot use strategy='single'.",
                "A launcher started several processes, which would train separate copies.",
                "Use strategy='ddp' or 'auto', or start one process.",
                world_size=read_launch().world_size,
            )
        target = torch.device(device if device is not None else find_device_type(use_cpu=use_cpu))
        num_seen = torch.accelerator.device_count() if target.type == find_device_type() else 0
        is_there = target.type in ("cpu", "meta", "xla") or (target.index or 0) < num_seen
        if not is_there or (use_cpu and target.type != "cpu"):
            reason = (
                "use_cpu=True forbids it." if use_cpu else f"torch sees {num_seen} devices of type {target.type!r}."
            )
            raise ConfigError(f"Cannot use device={str(device)!r}.", reason, "Choose another.", use_cpu=use_cpu)
        super().__init__(target, place_model=place_model)


class MPSStrategy(SingleDeviceStrategy):
    """Train in one process on an Apple GPU; `"single"` also selects one and uses the CPU if there is none.

    Args:
        use_cpu: Not supported: it contradicts the name.
        place_model: See `SingleDeviceStrategy`.

    Raises:
        ConfigError: See `SingleDeviceStrategy`; or torch finds no Apple GPU.

    Source: the documented `use_mps_device`.
    """

    name = "mps"

    def __init__(self, *, use_cpu: bool = False, place_model: bool = True) -> None:
        super().__init__(use_cpu=use_cpu, device="mps", place_model=place_model)

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        return None if device_type == "mps" else "it runs on Apple GPUs only"
