"""Checks for settings that DeepSpeed would ignore, apply differently or reject only after the launch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.core.parameters import whole_shape
from hftrain.strategies.deepspeed.config import find, refused

_OFFLOADS = ("offload_optimizer", "offload_param")
# The keys that a run fills or depends on. DeepSpeed ignores unknown keys.
_KEYS = (
    "zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "torch_autocast", "gradient_clipping",
    "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu",
)  # fmt: skip
_LIKENESS = 0.85
_BUFFER_SIZE = 100_000_000  # DeepSpeed's own


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a key is misspelled."""
    for key in config:
        # A key with a leading or trailing "_" or "#" was disabled on purpose.
        matches = difflib.get_close_matches(str(key), _KEYS, n=1, cutoff=_LIKENESS)
        if matches and str(key).strip("_#") not in _KEYS:
            raise refused(
                f"{key!r} is not one of its keys, and DeepSpeed would ignore it.", f"Did you mean {matches[0]!r}?"
            )


def check_offload(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the ZeRO stage does not support an offload, which DeepSpeed would silently ignore."""
    stage = int(find(config, "zero_optimization.stage") or 0)
    for part, cpu_stage in zip(_OFFLOADS, (1, 3), strict=True):
        device = find(config, f"zero_optimization.{part}.device")
        if device not in ("cpu", "nvme"):
            continue
        minimum = 3 if device == "nvme" else cpu_stage
        if stage < minimum:
            raise refused(
                f"DeepSpeed does {part} to {device!r} from stage {minimum} on; with less it would not, and not say so.",
                f"Set stage {minimum}{', or offload to the CPU' if stage >= cpu_stage else ''}, or leave {part} out.",
                stage=stage,
            )


def check_with_deepspeed(config: Mapping[str, Any], model: nn.Module, *, world_size: int) -> None:
    """Raise if DeepSpeed cannot train a model with a filled config. Imports DeepSpeed.

    Raises:
        ConfigError: DeepSpeed rejects the ZeRO section, with its reason, does not have the named optimizer or schedule,
            or cannot offload to NVMe.
    """
    _check_nvme(config)
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**config["zero_optimization"])
    except (ValueError, TypeError, AssertionError) as error:
        messages = "; ".join(_messages(error))
        reason = f"DeepSpeed rejects zero_optimization ({messages})."
        raise refused(reason, "See https://www.deepspeed.ai/docs/config-json.") from error
    optimizer, scheduler = find(config, "optimizer.type"), find(config, "scheduler.type")
    if optimizer and optimizer.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, optimizer):
        names = ", ".join(DEEPSPEED_OPTIMIZERS)
        raise refused(f"there is no optimizer {optimizer!r}.", f"Use one of torch's, or of DeepSpeed's: {names}.")
    if scheduler and not hasattr(lr_schedules, scheduler) and not hasattr(torch.optim.lr_scheduler, scheduler):
        names = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        raise refused(f"there is no schedule {scheduler!r}.", f"Use one of torch's, or of DeepSpeed's: {names}.")
    check_buffers(config, model, world_size=world_size)


def _check_nvme(config: Mapping[str, Any]) -> None:
    parts = [part for part in _OFFLOADS if find(config, f"zero_optimization.{part}.device") == "nvme"]
    if not parts:
        return
    problem = f"Cannot use a DeepSpeed config with device='nvme' in {' and '.join(parts)}."
    if not all(find(config, f"zero_optimization.{part}.nvme_path") for part in parts):
        raise ConfigError(problem, "It has no path.", "Set nvme_path next to the device, to a folder on the drive.")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        reason = "DeepSpeed reads and writes there through libaio, and does not find it or its headers."
        raise ConfigError(problem, reason, "Install libaio (Debian: libaio-dev), or offload to the CPU.")


def check_buffers(config: Mapping[str, Any], model: nn.Module, *, world_size: int) -> None:
    """Raise `ConfigError` if a process's shard of a parameter does not fit the buffers for NVMe offload."""
    offload = find(config, "zero_optimization.offload_param")
    if not offload or offload.get("device") != "nvme":
        return
    sizes = {name: whole_shape(each).numel() for name, each in model.named_parameters()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    required, capacity = -(-sizes.get(largest, 0) // world_size), int(float(offload.get("buffer_size", _BUFFER_SIZE)))
    if required > capacity:
        reason = f"A process's part of {largest} has {required} numbers, and offload_param's buffer_size is {capacity}."
        raise refused(reason, f"Set buffer_size to {required} or more; buffer_count of them are kept in memory.")


def _messages(error: Exception) -> list[str]:
    """Return pydantic's message for each key, or the error's own message."""
    if not hasattr(error, "errors"):
        return [str(error)]
    return [f"{'.'.join(map(str, each['loc'])) or 'all of it'}: {each['msg']}" for each in error.errors()]
