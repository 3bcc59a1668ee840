"""Strategies by name."""

from __future__ import annotations

import inspect
from typing import Any

from hftrain.core.errors import ConfigError, explain
from hftrain.core.registry import Registry
from hftrain.strategies.base import Strategy
from hftrain.strategies.environment import launched_world_size

strategies: Registry[Strategy] = Registry("strategy", group="hftrain.strategies")

strategies.register("single", "hftrain.strategies.single:SingleDeviceStrategy", summary="one process, one device")
strategies.register("ddp", "hftrain.strategies.ddp:DDPStrategy", summary="a copy of the model per process")
strategies.register(
    "ddp_find_unused",
    "hftrain.strategies.ddp:DDPStrategy",
    summary="like ddp, for models that leave parameters unused in some steps",
    find_unused_parameters=True,
)
strategies.register("fsdp", "hftrain.strategies.fsdp.strategy:FSDPStrategy", summary="a part of the model per process")
strategies.register(
    "fsdp_offload",
    "hftrain.strategies.fsdp.strategy:FSDPStrategy",
    summary="like fsdp, the parts in host memory",
    offload=True,
)
strategies.register(
    "fsdp_hybrid",
    "hftrain.strategies.fsdp.strategy:FSDPStrategy",
    summary="like fsdp within a machine, copies between machines",
    sharding="hybrid_shard",
)
strategies.register("xla", "hftrain.strategies.xla:XLAStrategy", summary="XLA devices (TPUs), driven by one process")
for _name in ("xla_fsdp", "xla_fsdp_v2"):
    strategies.register(
        _name, "hftrain.strategies.xla:XLAStrategy", summary="like xla, the model split over the devices", shards=True
    )


def create_strategy(name: str = "auto", **options: Any) -> Strategy:
    """Build a strategy by name; touches no device.

    Args:
        name: A registry name, or ``"auto"``: ``"ddp"`` if a launcher started several processes, else ``"single"``.
        **options: The strategy's own keyword arguments.

    Raises:
        ConfigError: No such name, or the strategy does not take an option.

    Example:
        >>> create_strategy("single", use_cpu=True).name
        'single'
    """
    if name == "auto":
        name = "ddp" if launched_world_size() > 1 else "single"
    factory, _ = strategies.resolve(name)
    accepted = inspect.signature(factory).parameters
    unknown = {option: value for option, value in options.items() if option not in accepted}
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        raise ConfigError(
            explain(
                f"strategy={name!r} was given options it does not take.",
                f"It takes {sorted(accepted)}.",
                "Remove the others, or choose another strategy.",
                **unknown,
            )
        )
    return strategies.create(name, **options)
