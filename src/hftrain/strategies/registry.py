"""Strategies by name."""

from __future__ import annotations

import inspect
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.registry import Registry
from hftrain.strategies.base import Strategy
from hftrain.strategies.environment import launched_world_size

strategies: Registry[Strategy] = Registry(
    "strategy",
    group="hftrain.strategies",
    elsewhere={
        "ddp_find_unused_parameters_true": "ddp_find_unused",
        "ddp_fork": "ddp",
        "ddp_notebook": "ddp",
        "ddp_spawn": "ddp",
        "dp": "data_parallel",
        "fsdp2": "fsdp",
        "single_device": "single",
    },
)

strategies.register("single", "hftrain.strategies.single:SingleDeviceStrategy", summary="one process, one device")
strategies.register("mps", "hftrain.strategies.single:MPSStrategy", summary="one process, an Apple GPU")
strategies.register("ddp", "hftrain.strategies.ddp:DDPStrategy", summary="a copy of the model per process")
strategies.register(
    "ddp_find_unused",
    "hftrain.strategies.ddp:DDPStrategy",
    summary="like ddp, for models that leave parameters unused in some steps",
    find_unused_parameters=True,
)
strategies.register(
    "data_parallel",
    "hftrain.strategies.data_parallel:DataParallelStrategy",
    summary="one process, several GPUs, the model copied to each for every batch",
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
strategies.register(
    "fsdp1", "hftrain.strategies.fsdp.wrapper:FSDP1Strategy", summary="like fsdp, with torch's older wrapper"
)
strategies.register(
    "deepspeed", "hftrain.strategies.deepspeed.strategy:DeepSpeedStrategy", summary="DeepSpeed, as its config says"
)
for _name, _summary, _preset in (
    ("deepspeed_stage_1", "DeepSpeed, the optimizer's state split", {"stage": 1}),
    ("deepspeed_stage_2", "like deepspeed_stage_1, gradients split too", {"stage": 2}),
    ("deepspeed_stage_2_offload", "like deepspeed_stage_2, the state in host memory", {"stage": 2, "offload": True}),
    ("deepspeed_stage_3", "like deepspeed_stage_2, parameters split too", {"stage": 3}),
    ("deepspeed_stage_3_offload", "like deepspeed_stage_3, all in host memory", {"stage": 3, "offload": True}),
):
    strategies.register(_name, "hftrain.strategies.deepspeed.strategy:DeepSpeedStrategy", summary=_summary, **_preset)
strategies.register("xla", "hftrain.strategies.xla:XLAStrategy", summary="XLA devices (TPUs), driven by one process")
strategies.register(
    "xla_fsdp",
    "hftrain.strategies.xla:XLAStrategy",
    summary="like xla_fsdp_v2; torch_xla's own wrapper on one device",
    shards=True,
    wraps=True,
)
strategies.register(
    "xla_fsdp_v2",
    "hftrain.strategies.xla:XLAStrategy",
    summary="like xla, the model split over the devices",
    shards=True,
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
    accepted = accepted_options(name)
    unknown = {option: value for option, value in options.items() if accepted is not None and option not in accepted}
    if unknown:
        raise ConfigError(
            f"strategy={name!r} was given options it does not take.",
            f"It takes {sorted(accepted or ())}.",
            "Remove the others, or choose another strategy.",
            **unknown,
        )
    return strategies.create(name, **options)


def accepted_options(name: str) -> set[str] | None:
    """Return the options that a strategy can be made with; None where it takes any."""
    factory, _ = strategies.resolve(name)
    accepted: set[str] = set()
    # A class that passes what it does not know on accepts what those that it derives from do.
    kinds = (
        [vars(kind)["__init__"] for kind in factory.__mro__ if "__init__" in vars(kind)]
        if isinstance(factory, type)
        else [factory]
    )
    for each in kinds:
        parameters = inspect.signature(each).parameters.values()
        accepted |= {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            return accepted - {"self"}
    return None
