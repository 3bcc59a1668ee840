"""Strategies by name."""

from __future__ import annotations

import inspect
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.launcher import read_launch
from hftrain.core.registry import Registry
from hftrain.strategies.base import Strategy

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
        **{f"zero{stage}": f"deepspeed_stage_{stage}" for stage in (1, 2, 3)},
    },
)

_SINGLE, _DDP = "single:SingleDeviceStrategy", "ddp:DDPStrategy"
_FSDP, _DEEPSPEED, _XLA = "fsdp.strategy:FSDPStrategy", "deepspeed.strategy:DeepSpeedStrategy", "xla:XLAStrategy"
_MESH = "mesh.strategy:MeshStrategy"
_UNUSED = "ddp for models that leave parameters unused in some steps"
_COPIES = "one process; the model is copied to every GPU for each batch"
_OFFLOAD = {"offload": True}
# Name, location in this package, summary, options.
_BUILT_IN: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("single", _SINGLE, "one process, one device", {}),
    ("mps", "single:MPSStrategy", "one process, an Apple GPU", {}),
    ("ddp", _DDP, "one process per device, a replica of the model in each", {}),
    ("ddp_find_unused", _DDP, _UNUSED, {"find_unused_parameters": True}),
    ("data_parallel", "data_parallel:DataParallelStrategy", _COPIES, {}),
    ("fsdp", _FSDP, "parameters, gradients and optimizer state sharded over processes", {}),
    ("fsdp_offload", _FSDP, "fsdp with the shards in host memory", _OFFLOAD),
    ("fsdp_hybrid", _FSDP, "fsdp within each machine, replicas across machines", {"sharding": "hybrid_shard"}),
    ("fsdp1", _FSDP, "another name of fsdp", {}),
    ("deepspeed", _DEEPSPEED, "DeepSpeed with the configuration in deepspeed=", {}),
    ("deepspeed_stage_1", _DEEPSPEED, "ZeRO stage 1: optimizer state sharded", {"stage": 1}),
    ("deepspeed_stage_2", _DEEPSPEED, "ZeRO stage 2: gradients sharded too", {"stage": 2}),
    (
        "deepspeed_stage_2_offload",
        _DEEPSPEED,
        "ZeRO stage 2, optimizer state in host memory",
        {"stage": 2} | _OFFLOAD,
    ),
    ("deepspeed_stage_3", _DEEPSPEED, "ZeRO stage 3: parameters sharded too", {"stage": 3}),
    (
        "deepspeed_stage_3_offload",
        _DEEPSPEED,
        "ZeRO stage 3, parameters and optimizer state in host memory",
        {"stage": 3} | _OFFLOAD,
    ),
    ("mesh", _MESH, "a mesh of sizes that you name: tp_size, cp_size, pp_size, dp_replicate, dp_shard", {}),
    ("tp", _MESH, "each layer shared by tensor ranks; other processes shard that", {"uses": ("tp",)}),
    ("fsdp_tp", _MESH, "each layer shared by tensor ranks, and its parts sharded", {"uses": ("dp_shard", "tp")}),
    ("hsdp", _MESH, "shards within each machine, replicas across machines", {"uses": ("dp_replicate", "dp_shard")}),
    ("hsdp_tp", _MESH, "hsdp with layers shared by tensor ranks", {"uses": ("dp_replicate", "dp_shard", "tp")}),
    ("cp", _MESH, "each sequence shared by context ranks, which shard the parameters", {"uses": ("cp",)}),
    ("fsdp_cp", _MESH, "each sequence shared by context ranks, parameters sharded", {"uses": ("dp_shard", "cp")}),
    ("tp_cp", _MESH, "layers shared by tensor ranks, sequences by context ranks", {"uses": ("tp", "cp")}),
    ("pp", _MESH, "a pipeline of stages; other processes shard these", {"uses": ("pp",)}),
    ("fsdp_pp", _MESH, "a pipeline whose stages are sharded", {"uses": ("dp_shard", "pp")}),
    ("xla", _XLA, "XLA devices (TPUs), driven by one process", {}),
    ("xla_fsdp", _XLA, "xla with the model sharded over the devices", {"shards": True}),
    ("xla_fsdp_v2", _XLA, "another name of xla_fsdp", {"shards": True}),
)
for _name, _home, _summary, _preset in _BUILT_IN:
    strategies.register(_name, f"hftrain.strategies.{_home}", summary=_summary, **_preset)


def create_strategy(name: str = "auto", **options: Any) -> Strategy:
    """Create a strategy by name; touches no device.

    Args:
        name: A registry name, or ``"auto"``: ``"ddp"`` if a launcher started several processes, else ``"single"``.

    Raises:
        ConfigError: The name is unknown, or the strategy does not accept an option.

    Example:
        >>> create_strategy("single", use_cpu=True).name
        'single'
    """
    if name == "auto":
        name = "ddp" if read_launch().world_size > 1 else "single"
    names = accepted_options(name)
    unknown = {option: value for option, value in options.items() if names is not None and option not in names}
    if unknown:
        raise ConfigError(
            f"Cannot make strategy={name!r} with these options.",
            f"It takes {sorted(names or ())}.",
            "Remove the others, or choose another strategy.",
            **unknown,
        )
    return strategies.create(name, **options)


def accepted_options(name: str) -> set[str] | None:
    """Return the options that a strategy accepts; None if it accepts any."""
    factory, _ = strategies.resolve(name)
    names: set[str] = set()
    # A class that forwards **kwargs also accepts the options of its base classes.
    kinds = (
        [vars(kind)["__init__"] for kind in factory.__mro__ if "__init__" in vars(kind)]
        if isinstance(factory, type)
        else [factory]
    )
    for each in kinds:
        parameters = inspect.signature(each).parameters.values()
        names |= {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            return names - {"self"}
    return None
