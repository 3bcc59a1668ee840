"""Read a DeepSpeed config, fill its "auto" values, and refuse what DeepSpeed would ignore or reject too late."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, a_kind, read_json
from hftrain.core.parameters import whole_shape

AUTO = "auto"
STAGES = (0, 1, 2, 3)
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_PREFETCH = "stage3_prefetch_bucket_size"
# With these the engine divides the work in ways that hftrain's loaders do not support.
_PARALLEL = ("tensor_parallel.autotp_size", "sequence_parallel_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """The run's value for one key of the config.

    Args:
        key: The key; nested keys are joined by dots (``"optimizer.params.lr"``).
        name: The argument that sets it, for the error.
        must_match: Whether a different value in the config is an error; otherwise the config's value is kept.
        creates: Whether the key is added if the config does not have it.
    """

    key: str
    value: Any
    name: str
    must_match: bool = True
    creates: bool = False


def read_config(given: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a copy of a config, from a dict or the path of a JSON file.

    Raises:
        ConfigError: The file cannot be read, or its settings are invalid or not supported here.
    """
    if isinstance(given, (str, Path)):
        problem = f"Cannot read the DeepSpeed config {str(given)!r} as JSON:"
        given = read_json(given, problem, "Pass the path of a JSON file, or a dict.")
    if not isinstance(given, Mapping):
        raise refused(f"it is {a_kind(given)}, not a dict.", "Pass a JSON object, or a dict.")
    config: dict[str, Any] = copy.deepcopy(dict(given))
    if "bfloat16" in config and "bf16" not in config:
        config["bf16"] = config.pop("bfloat16")  # the key's old name, which DeepSpeed still accepts
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise refused(f"zero_optimization is {zero!r}, not a dict.", "Use a dict such as {'stage': 2}.")
    if zero.get("stage", 0) not in (*STAGES, AUTO) or isinstance(zero.get("stage"), bool):
        remedy = f"Write the number {zero['stage']}." if zero["stage"] in map(str, STAGES) else f"Use one of {STAGES}."
        raise refused(f"zero_optimization.stage={zero['stage']!r} is not a stage of ZeRO.", remedy)
    for key in _PARALLEL:
        size = find(config, key) or 1
        if size not in (1, AUTO):
            reason = f"{key} splits each sample's work over processes, which hftrain's loaders do not follow."
            raise refused(reason, "Leave it out, or set it to 1.", **{key.rpartition(".")[2]: size})
    return config


def with_preset(config: dict[str, Any] | None, *, stage: int | None, offload: bool) -> dict[str, Any]:
    """Return a config with the stage and offload of a strategy's name.

    Raises:
        ConfigError: The config sets another stage, or no offload.
    """
    is_own = config is None
    config = {"zero_optimization": {}} if config is None else config
    zero = config["zero_optimization"]
    if stage is not None and zero.get("stage", AUTO) not in (AUTO, stage):
        raise refused(
            f"The strategy's name means stage {stage}, and the config says {zero['stage']}.",
            "Use strategy='deepspeed' with a config, or a name and no config.",
            stage=zero["stage"],
        )
    if stage is not None or is_own or zero.get("stage") == AUTO:
        zero["stage"] = 2 if stage is None else stage
    if offload:
        for part in ("offload_optimizer", "offload_param")[: 2 if zero["stage"] == 3 else 1]:
            device = zero.setdefault(part, {"device": "cpu"})
            if isinstance(device, Mapping) and device.get("device", "none") == "none":
                reason = f"The strategy's name means offload, and the config's {part} says that nothing is offloaded."
                raise refused(reason, f"Take the name without offload, or leave {part} out.")
    if find(config, "zero_optimization.offload_param.device") == "nvme" and zero.get(_PREFETCH, AUTO) == AUTO:
        # DeepSpeed 0.19 reads parameters used by both the end of forward and the start of backward twice, and fails.
        zero[_PREFETCH] = 0
    if is_own and zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return config


def fill(config: dict[str, Any], values: Iterable[Fill]) -> None:
    """Replace "auto" values of the config by the run's values; mutates the config.

    Raises:
        ConfigError: Values of the config contradict the run; the error lists all of them.
    """
    mismatches = []
    for entry in values:
        section, _, leaf = entry.key.rpartition(".")
        node = find(config, section) if section else config
        if not isinstance(node, dict):
            continue
        value = node.get(leaf)
        if value == AUTO or (value is None and entry.creates):
            node[leaf] = entry.value
        elif value is not None and entry.must_match and not _same(value, entry.value):
            mismatches.append(f"{entry.key}={value!r} ({entry.name} means {entry.value!r})")
    if mismatches:
        raise ConfigError(
            "Cannot use the DeepSpeed config: it contradicts the arguments.",
            f"{'; '.join(mismatches)}.",
            'Write "auto" in the config, which takes the argument\'s value, or make the two agree.',
        )


def model_values(model: nn.Module) -> list[Fill]:
    """Return the bucket sizes that DeepSpeed recommends for a model's hidden size; empty without a hidden size.

    Source: the documented ZeRO-3 config.
    """
    size = hidden_size(model)
    if size is None:
        return []
    sizes = {
        "reduce_bucket_size": size * size,
        "stage3_prefetch_bucket_size": int(0.9 * size * size),
        "stage3_param_persistence_threshold": 10 * size,
    }
    return [
        Fill(key=f"zero_optimization.{key}", value=value, name="hidden size", must_match=False)
        for key, value in sizes.items()
    ]


def precision_values(config: dict[str, Any], half: str | None) -> list[Fill]:
    """Return the precision's values for the config; adds the active precision's section if it is missing."""
    autocast = config.get("torch_autocast") or {}
    if half is not None and autocast.get("enabled"):
        dtype_name = str(HALVES[half]).removeprefix("torch.")
        return [Fill(key="torch_autocast.dtype", value=dtype_name, name="precision", creates=True)]
    if half is not None:
        config.setdefault(half, {"enabled": True})
    values = [Fill(key=f"{name}.enabled", value=name == half, name="precision") for name in HALVES]
    return [*values, Fill(key="torch_autocast.enabled", value=False, name="precision")]


def hidden_size(model: nn.Module) -> int | None:
    """Return the hidden size in a model's config, or the largest of several; None without one."""
    config = getattr(model, "config", None)
    for source in (config, getattr(config, "text_config", None)):
        size = getattr(source, "hidden_size", None)
        sizes = getattr(source, "hidden_sizes", None)
        if isinstance(size, int):
            return size
        if sizes:
            return int(max(sizes))
    return None


def find(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a nested key; None if it is missing."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def find_auto(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys whose value is still "auto"."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from find_auto(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"


def _same(present: Any, value: Any) -> bool:
    if isinstance(present, (list, tuple)) and isinstance(value, (list, tuple)):
        return list(present) == list(value)
    return bool(present == value)


def refused(reason: str, remedy: str, **received: Any) -> ConfigError:
    """Return the error for a config that cannot be used."""
    return ConfigError("Cannot use the DeepSpeed config:", reason, remedy, **received)


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
