"""Several GPUs in one process: what the arguments then say, and which models cannot be copied for each batch."""

from __future__ import annotations

from typing import Any

from torch import nn

from hftrain.arguments.enums import DebugOption
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError
from hftrain.strategies.base import Strategy
from hftrain.task.quantized import is_quantized
from hftrain.trainer.placement import is_spread


def forget_devices(args: Any, model: Any) -> None:
    """Let the arguments count the devices again; a model that is spread over them counts as on one. Mutates `args`."""
    vars(args).pop("_n_gpu", None)
    if model is not None and any(map(is_spread, (model, getattr(model, "model", model)))):
        args._n_gpu = min(args.n_gpu, 1)


def note_devices(args: Any, strategy: Strategy) -> None:
    """Let the arguments say how many devices the strategy takes: batch sizes are per device. Mutates `args`."""
    num = getattr(strategy, "num_devices", 1)
    if max(args.n_gpu, 1) != num:
        args._n_gpu = num


def check_copies(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, compiles: bool) -> None:
    """Raise where one process should copy a model to several GPUs that cannot be copied.

    Raises:
        ConfigError: It is spread over devices, quantized, compiled, or hooks on its modules would miss the copies.
    """
    if strategy.name != "data_parallel":
        return
    reason = None
    if is_spread(model):
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
            f"strategy='data_parallel' was to train {type(model).__name__}.",
            reason,
            "Start one process per GPU with torchrun, or use strategy='single' (CUDA_VISIBLE_DEVICES=0).",
        )
