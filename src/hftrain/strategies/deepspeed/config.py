"""Read and check a DeepSpeed config and fill its "auto" values; one error lists all contradictions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, a_kind, read_json

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
