"""Checks of the model: the devices of its layers, and the kind of its weights."""

from __future__ import annotations

from torch import nn

from hftrain.arguments.enums import DebugOption
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import is_on_several_devices
from hftrain.task.quantized import is_quantized


def check_not_sharded(model: nn.Module) -> None:
    """Raise if a model was sharded when it was loaded, because it then synchronises gradients itself."""
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            f"Cannot train {type(model).__name__} as it was loaded with distributed_config=DistributedConfig(...):",
            "the strategy would wrap and synchronise its shards a second time.",
            "Load it without distributed_config, and let strategy='fsdp' shard it.",
        )


def check_copies(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, compiles: bool) -> None:
    """Raise if one process would have to replicate a model on several GPUs, and the model cannot be copied."""
    if strategy.name != "data_parallel":
        return
    reason = None
    if is_on_several_devices(model):
        reason = "Its layers are on several devices already."
    elif is_quantized(model):
        reason = "Its weights are quantized, and what they are packed in is not copied from device to device."
    elif compiles:
        reason = "torch_compile compiles for one device, and every batch would have new copies."
    elif DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        reason = "debug='underflow_overflow' watches modules, but every batch would run new copies of them."
    elif args.gradient_checkpointing and "layer_classes" in (args.gradient_checkpointing_kwargs or ()):
        reason = "gradient_checkpointing_kwargs' layer_classes would run the layers of the first GPU in every copy."
    if reason:
        raise ConfigError(
            f"Cannot train {type(model).__name__} with strategy='data_parallel'.",
            reason,
            "Start one process per GPU with torchrun, or use strategy='single' (CUDA_VISIBLE_DEVICES=0).",
        )
