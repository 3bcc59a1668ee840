"""Deprecated names: each still works, warns once with the new name, and is reset to its default.

The reset keeps copies (`dataclasses.replace`) from warning again, and from contradicting a new value.
"""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Any

from hftrain.arguments.enums import DebugOption, FSDPOption, OptimizerNames, ShardedDDPOption
from hftrain.arguments.fields import ArgumentFields
from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ArgumentFields)}

_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "fp16_backend": "half_precision_backend",
    "xpu_backend": "ddp_backend",
    "torchdynamo": "torch_compile_backend",
    "push_to_hub_token": "hub_token",
}
# Former switches that are now members of a list.
_NOW_MEMBERS = {
    "tpu_metrics_debug": ("debug", DebugOption.TPU_METRICS_DEBUG),
    "include_inputs_for_metrics": ("include_for_metrics", "inputs"),
}
_FSDP_KEYS = {
    "fsdp_min_num_params": "min_num_params",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
}
_SHARDINGS = {
    ShardedDDPOption.SIMPLE: FSDPOption.SHARD_GRAD_OP,
    ShardedDDPOption.ZERO_DP_2: FSDPOption.SHARD_GRAD_OP,
    ShardedDDPOption.ZERO_DP_3: FSDPOption.FULL_SHARD,
    ShardedDDPOption.OFFLOAD: FSDPOption.OFFLOAD,
    ShardedDDPOption.AUTO_WRAP: FSDPOption.AUTO_WRAP,
}


def apply_renames(args: ArgumentFields) -> None:
    """Move the value of every deprecated name to the new one; mutates the arguments."""
    for old, new in _RENAMED.items():
        if _is_given(args, old):
            _take_over(args, old, new, getattr(args, old))
    if args.adafactor:
        _take_over(args, "adafactor", "optim", OptimizerNames.ADAFACTOR)
    args.optim = current_optimizer(args.optim)
    for old, (new, member) in _NOW_MEMBERS.items():
        if getattr(args, old):
            setattr(args, old, False)
            if member not in getattr(args, new):
                setattr(args, new, [*getattr(args, new), member])
            _deprecate(old, f"{new}={member!r}" if old == "tpu_metrics_debug" else f"{new}=[{member!r}]")
    if args.use_mps_device:
        args.use_mps_device = False
        _deprecate("use_mps_device", "nothing: MPS is chosen by itself; use_cpu=True avoids it")
    _rename_hub_model(args)
    for old, key in _FSDP_KEYS.items():
        if _is_given(args, old):
            _take_over_fsdp_key(args, old, key)
    _rename_sharded_ddp(args)


def current_optimizer(name: str) -> str:
    """Return the current name of an optimizer; a deprecated one warns."""
    if name == "adamw_hf":
        _deprecate("optim='adamw_hf'", "optim='adamw_torch'")
        return OptimizerNames.ADAMW_TORCH
    return name


def _is_given(args: ArgumentFields, name: str) -> bool:
    return bool(getattr(args, name) != _DEFAULTS[name])


def _deprecate(old: str, new: str) -> None:
    warn_once(f"{old} is deprecated. Use {new} instead.", FutureWarning)


def _conflict(old: str, old_value: Any, new: str, new_value: Any) -> ConfigError:
    values = {} if new.endswith("_token") else {old: old_value, new: new_value}
    return ConfigError(
        f"Cannot use {old} together with {new}.",
        f"{old} is the old form of {new}, and the two differ.",
        f"Keep {new} alone.",
        **values,
    )


def _take_over(args: ArgumentFields, old: str, new: str, value: Any) -> None:
    if _is_given(args, new) and getattr(args, new) != value:
        raise _conflict(old, getattr(args, old), new, getattr(args, new))
    setattr(args, new, value)
    setattr(args, old, _DEFAULTS[old])
    _deprecate(old, new if new.endswith("_token") else f"{new}={value!r}")


def _rename_hub_model(args: ArgumentFields) -> None:
    name, owner = args.push_to_hub_model_id, args.push_to_hub_organization
    if name is None and owner is None:
        return
    old = "push_to_hub_organization" if name is None else "push_to_hub_model_id"
    name = name or PurePath(args.output_dir or "").name
    _take_over(args, old, "hub_model_id", f"{owner}/{name}" if owner else name)
    args.push_to_hub_organization = None


def _take_over_fsdp_key(args: ArgumentFields, old: str, key: str) -> None:
    value, config = getattr(args, old), args.fsdp_config or {}
    if isinstance(config, str) or config.get(key, value) != value:
        raise _conflict(old, value, "fsdp_config", config)
    args.fsdp_config = {**config, key: value}
    setattr(args, old, _DEFAULTS[old])
    _deprecate(old, f"fsdp_config={{{key!r}: {value!r}}}")


def _rename_sharded_ddp(args: ArgumentFields) -> None:
    setting: Any = args.sharded_ddp
    args.sharded_ddp = ""
    words = ["simple"] if setting is True else setting.split() if isinstance(setting, str) else list(setting or [])
    if not words:
        return
    # The 4.24 command lines write both spellings of offloading.
    options = [ShardedDDPOption(str(word).replace("cpu_offload", "offload")) for word in words]
    if ShardedDDPOption.SIMPLE in options and len(options) > 1:
        raise ConfigError(
            f"Cannot use sharded_ddp={setting!r}.",
            "'simple' goes with no other option: offload and auto_wrap belong to zero_dp_2 and zero_dp_3.",
            "Use 'zero_dp_2' in place of 'simple', or leave the others out.",
        )
    shardings = list(dict.fromkeys(_SHARDINGS[option] for option in options))
    if args.fsdp and list(args.fsdp) != shardings:
        raise _conflict("sharded_ddp", setting, "fsdp", args.fsdp)
    args.fsdp = shardings
    _deprecate("sharded_ddp", f"fsdp={' '.join(shardings)!r}")
