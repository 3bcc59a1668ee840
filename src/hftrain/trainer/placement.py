"""Where a model's layers are: on one device, spread over several, or split within a layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError

_NO_ACCELERATOR = ("cpu", "disk", "meta")


def is_spread(model: nn.Module) -> bool:
    """Tell whether a model's layers were put on different accelerators, by a device map or by its own `parallelize`."""
    device_map = getattr(model, "hf_device_map", None)
    if device_map:
        return len({str(device) for device in device_map.values()} - set(_NO_ACCELERATOR)) > 1
    if getattr(model, "is_parallelizable", False) and getattr(model, "model_parallel", False):
        return True
    return len({parameter.device for parameter in model.parameters()}) > 1


def check_not_sharded(model: nn.Module) -> None:
    """Refuse a model that was sharded when it was loaded: it exchanges its gradients by rules of its own.

    Raises:
        ConfigError: It is one of `from_pretrained(distributed_config=...)`.
    """
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            f"Cannot train {type(model).__name__} as it was loaded with distributed_config=DistributedConfig(...):",
            "the strategy would wrap and synchronise its shards a second time.",
            "Load it without distributed_config, and let strategy='fsdp' shard it.",
        )


def tensor_parallel_size(model: nn.Module, deepspeed_config: Any = None) -> int:
    """Return over how many processes each layer is split: as the model says, else as the DeepSpeed config does."""
    size = getattr(model, "tp_size", None) or getattr(model, "_tp_size", None)
    if size is None and deepspeed_config:
        size = (deepspeed_config.get("tensor_parallel") or {}).get("autotp_size")
    return int(size or 1)
