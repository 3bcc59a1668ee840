"""accelerate's `ParallelismConfig` and transformers' `DistributedConfig` as a strategy and its options."""

from __future__ import annotations

from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.meta import is_weightless
from hftrain.strategies.environment import is_set

# The strategy's options by the fields of both configs.
_OPTIONS = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "fsdp_size": "dp_shard",
    "tp_size": "tp_size",
    "cp_size": "cp_size",
    "sp_size": "cp_size",
    "pp_size": "pp_size",
}
# Fields that ask for what the mesh does not do.
_REFUSED = {
    "ep_size": "Experts cannot be shared out one by one yet: their gradients are not proved.",
    "enable_expert_parallel": "Experts cannot be shared out one by one yet: their gradients are not proved.",
    "fsdp_plan": "The units that are sharded are the model's layers, or those of transformer_layer_cls_to_wrap.",
    "fsdp_cpu_offload": "Offloading is an argument: fsdp='full_shard offload'.",
    "fsdp_mixed_precision": "The precision is an argument: bf16=True.",
}
_HYBRID = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}


def mesh_request(args: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the strategy and options that `parallelism_config`, or the launcher's, selects; None without either.

    Raises:
        ConfigError: It is another object, its sizes contradict each other or the launcher, or it asks for what the
            strategies do not do.
    """
    if is_weightless():  # `hftrain plan` runs the script as one process
        return None
    config = args.parallelism_config
    if config is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate.parallelism_config import ParallelismConfig

        config = ParallelismConfig()
    if config is None:
        return None
    is_distributed = hasattr(config, "fsdp_size") and hasattr(config, "tp_size")
    if not is_distributed and not all(hasattr(config, name) for name in ("dp_replicate_size", "dp_shard_size")):
        reason = f"A {type(config).__name__} is neither accelerate's ParallelismConfig nor a DistributedConfig."
        raise _refusal({}, reason, "Make one: accelerate.ParallelismConfig(dp_shard_size=2).")
    sizes = {name: int(getattr(config, name, 1) or 1) for name in _OPTIONS if hasattr(config, name)}
    for name, reason in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in (None, False, 1):
            raise _refusal({**sizes, name: value}, reason, f"Leave {name} out.")
    if sizes.get("cp_size", 1) > 1 and sizes.get("sp_size", 1) > 1:
        reason = "cp_size and sp_size both split sequences over processes."
        raise _refusal(sizes, reason, "Use cp_size alone; attention is exchanged where the processes divide the heads.")
    options: dict[str, Any] = {}
    for name, size in sizes.items():
        options[_OPTIONS[name]] = max(options.get(_OPTIONS[name], 1), size)
    if any(options.get(name, 1) > 1 for name in ("tp_size", "cp_size", "pp_size")):
        plan = getattr(config, "tp_plan", None)
        if plan == {}:
            reason = "An empty tp_plan splits no layer, and tensor ranks would all compute the same."
            raise _refusal(sizes, reason, "Leave tp_plan out, or tp_size at 1.")
        extra = {
            "plan": None if plan in (None, "auto") else plan,
            "attention": "ulysses" if sizes.get("sp_size", 1) > 1 else None,
            "sequence_parallel": True if getattr(config, "enable_sequence_parallel", False) else None,
        }
        return "mesh", {**options, **{name: value for name, value in extra.items() if value is not None}}
    return _data_parallel(args, sizes, options["dp_replicate"], options["dp_shard"])


def _data_parallel(args: Any, sizes: dict[str, int], replicas: int, shards: int) -> tuple[str, dict[str, Any]] | None:
    if replicas == shards == 1:
        return None
    if replicas * shards != args.world_size:
        reason = f"It describes {replicas * shards} processes, and the launcher started {args.world_size}."
        raise _refusal(sizes, reason, "Start that many, or change the sizes.")
    if shards == 1:
        return "ddp", {}
    words = [str(word) for word in args.fsdp or ()]
    sharding = next((word for word in words if word not in ("offload", "auto_wrap")), "full_shard")
    sharding = {hybrid: name for name, hybrid in _HYBRID.items()}.get(sharding, sharding) if replicas > 1 else sharding
    if sharding not in _HYBRID:
        reason = f"fsdp={sharding!r} splits the model differently from dp_shard_size={shards}."
        raise _refusal(sizes, reason, "Leave one of the two out.")
    if replicas == 1:
        return "fsdp", {"sharding": sharding}
    return "fsdp", {"sharding": _HYBRID[sharding], "shard_size": shards}


def _refusal(sizes: dict[str, Any], reason: str, remedy: str) -> ConfigError:
    return ConfigError("Cannot use this parallelism_config.", reason, remedy, **sizes)
