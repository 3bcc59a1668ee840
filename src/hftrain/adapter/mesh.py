"""accelerate's `ParallelismConfig`: how many processes copy the model, split it, or share one sample."""

from __future__ import annotations

import os
from typing import Any

from hftrain.core.errors import ConfigError

_SPLITS = {"tp_size": "layers", "cp_size": "sequences", "sp_size": "sequences"}
_HYBRID = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}


def mesh_request(args: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the strategy and the options that `parallelism_config` asks for; None where it asks for nothing.

    Args:
        args: The training arguments; without theirs, what `accelerate launch --use_parallelism_config` says is read.

    Raises:
        ConfigError: It asks for what no strategy here does, or for another number of processes.
    """
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        from accelerate.parallelism_config import ParallelismConfig

        config = ParallelismConfig()
    if config is None:
        return None
    names = ("dp_replicate_size", "dp_shard_size", *_SPLITS)
    if not all(hasattr(config, name) for name in names[:3]):
        reason = f"A {type(config).__name__} is not accelerate's ParallelismConfig."
        raise _refusal({}, reason, "Make one: accelerate.ParallelismConfig(dp_shard_size=2).")
    sizes = {name: int(getattr(config, name, 1) or 1) for name in names}
    for name, what in _SPLITS.items():
        if sizes[name] > 1:
            reason = (
                f"{name} splits {what} over processes, and here each process reads and computes samples of its own."
            )
            raise _refusal(sizes, reason, f"Leave {name} at 1, and split the parameters: dp_shard_size.")
    copies, parts = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    if copies == parts == 1:
        return None
    if copies * parts != args.world_size:
        reason = f"It describes {copies * parts} processes, and the launcher started {args.world_size}."
        raise _refusal(sizes, reason, "Start that many, or change the sizes.")
    if parts == 1:
        return "ddp", {}
    words = [str(word) for word in args.fsdp or ()]
    sharding = next((word for word in words if word not in ("offload", "auto_wrap")), "full_shard")
    sharding = {hybrid: plain for plain, hybrid in _HYBRID.items()}.get(sharding, sharding) if copies > 1 else sharding
    if sharding not in _HYBRID:
        reason = f"fsdp={sharding!r} splits the model differently from dp_shard_size={parts}."
        raise _refusal(sizes, reason, "Leave one of the two out.")
    if copies == 1:
        return "fsdp", {"sharding": sharding}
    return "fsdp", {"sharding": _HYBRID[sharding], "shard_size": parts}


def _refusal(sizes: dict[str, int], reason: str, remedy: str) -> ConfigError:
    return ConfigError("parallelism_config was given.", reason, remedy, **sizes)
