"""Convert settings that may be written in several forms: lists, JSON text, paths, choices, deprecated names."""

from __future__ import annotations

import dataclasses
import json
import os
from enum import Enum
from pathlib import PurePath
from typing import Any

from hftrain.arguments.enums import (
    DebugOption,
    FSDPOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
    ShardedDDPOption,
)
from hftrain.arguments.fields import ArgumentFields
from hftrain.arguments.processes import AcceleratorConfig
from hftrain.core.errors import ConfigError, suggest
from hftrain.core.lengths import read_length
from hftrain.core.log import warn_once

# When to act, if the strategy of the same name is "steps".
INTERVALS = ("logging_steps", "eval_steps", "save_steps")
# What may be a text with a unit.
LENGTHS = ("num_train_epochs", "max_steps", "warmup_steps", *INTERVALS)
_LISTS = ("label_names", "include_for_metrics")
_WORDS = ("debug", "fsdp")
# Dict settings that may be the path of a file instead.
_JSON_OR_PATH = ("fsdp_config", "deepspeed", "accelerator_config")
_CHOICES: dict[str, type[Enum]] = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}
_MEANT = dict.fromkeys(("adam", "adamw"), "Use 'adamw_torch'; with weight_decay=0, the default, it is Adam.")
_CHOICE_LISTS: dict[str, type[Enum]] = {"debug": DebugOption, "fsdp": FSDPOption}


def normalize(args: ArgumentFields) -> None:
    """Convert every setting except the choices to its normal form; mutates the arguments."""
    args.output_dir = _expand("trainer_output" if args.output_dir is None else args.output_dir)
    if args.logging_dir is not None:
        args.logging_dir = _expand(args.logging_dir)
    _normalize_lengths(args)
    _normalize_lists(args)
    _normalize_json(args)
    if args.eval_delay is None:
        args.eval_delay = 0
    if args.include_num_input_tokens_seen == "no":
        args.include_num_input_tokens_seen = False
    elif args.include_num_input_tokens_seen is True:
        args.include_num_input_tokens_seen = "all"


def convert_choices(args: ArgumentFields) -> None:
    """Convert the names of choices to members of their enums; mutates the arguments."""
    for name, choice in _CHOICES.items():
        setattr(args, name, _choose(choice, getattr(args, name), name))
    for name, choice in _CHOICE_LISTS.items():
        setattr(args, name, [_choose(choice, word, name) for word in getattr(args, name)])


def _choose(choice: type[Enum], value: Any, setting: str) -> Enum:
    """Return the member of a value; errors name the setting, not the enum."""
    try:
        return choice(value)
    except ConfigError:
        values = [str(member.value) for member in choice]
        remedy = _MEANT.get(str(value).lower()) or suggest(str(value), values)
        raise ConfigError(f"Cannot use {setting}={value!r}.", f"{setting} has no such value.", remedy) from None


def _normalize_lengths(args: ArgumentFields) -> None:
    """Convert texts such as "500ba" to numbers; the intervals that need the run to be known stay as they are."""
    for name in LENGTHS:
        length = read_length(getattr(args, name))
        if length is None:
            continue
        value, unit, is_duration = length.value, length.unit, name in ("num_train_epochs", "max_steps")
        if unit == "ba" and value.is_integer() and value < 2**53:
            setattr(args, name, int(value))
            if is_duration:
                args.num_train_epochs, args.max_steps = 3.0, int(value)
        elif unit == "ep" and is_duration:
            args.num_train_epochs = value
            args.max_steps = -1 if name == "max_steps" else args.max_steps
        elif unit == "dur" and not is_duration and value < 1:
            setattr(args, name, value)
        elif unit not in ("ep", "tok", "s") or name not in INTERVALS or (unit == "tok" and name == "logging_steps"):
            share = "" if is_duration else ", or a share of the run below 1 (0.1dur)"
            epochs = ", or epochs (10ep)" if is_duration or name in INTERVALS else ""
            raise ConfigError(
                f"Cannot use {name}={length.text!r}.",
                "It cannot be counted." if name in INTERVALS else "The schedule is planned in whole updates.",
                f"Write whole updates (500ba){share}{epochs}. To end a run early, pass max_time='2h' to the Trainer.",
            )


def _expand(path: str) -> str:
    """Return the path as text; the home folder is looked up only for a path that begins with '~'."""
    text = os.fspath(path)
    return os.path.expanduser(text) if text.startswith("~") else text


def _normalize_lists(args: ArgumentFields) -> None:
    fsdp: Any = args.fsdp
    if fsdp is True:
        args.fsdp = [FSDPOption.FULL_SHARD]
    elif isinstance(fsdp, str):
        # The spelling in the documentation's XLA chapter.
        args.fsdp = fsdp.replace("full shard", "full_shard")
    if args.include_for_metrics is None:
        args.include_for_metrics = []
    for name in _LISTS:
        value = getattr(args, name)
        setattr(args, name, [value] if isinstance(value, str) else value)
    for name in _WORDS:
        value = getattr(args, name) or []
        setattr(args, name, value.split() if isinstance(value, str) else list(value))
    args.report_to = _trackers(args.report_to)


def _trackers(value: str | list[str] | None) -> list[str] | None:
    if value is None:
        # Replaced by the Trainer, because the default depends on the installed trackers.
        return None
    trackers = [value] if isinstance(value, str) else list(value)
    if "none" not in trackers:
        return trackers
    if len(trackers) > 1:
        raise ConfigError(
            f"Cannot use report_to={trackers}.",
            "'none' turns all trackers off.",
            "Remove 'none', or the trackers.",
        )
    return []


def _normalize_json(args: ArgumentFields) -> None:
    fields = ArgumentFields._VALID_DICT_FIELDS
    for name in dict.fromkeys([*fields, *type(args)._VALID_DICT_FIELDS]):
        value = getattr(args, name)
        # A field that a subclass adds may be any text.
        is_json = name in fields and name not in _JSON_OR_PATH
        if isinstance(value, str) and (is_json or value.lstrip().startswith("{")):
            setattr(args, name, convert_texts(_parse(name, value)))
    if args.lr_scheduler_kwargs is None:
        args.lr_scheduler_kwargs = {}
    # The Trainer reads a path later, because building arguments reads no file.
    config: Any = args.accelerator_config
    if not isinstance(config, (str, os.PathLike)):
        config = AcceleratorConfig.from_settings(config)
    args.accelerator_config = config
    if isinstance(args.fsdp_config, dict):
        args.fsdp_config = strip_fsdp(args.fsdp_config)


def strip_fsdp(config: dict[str, Any]) -> dict[str, Any]:
    """Return `fsdp_config` without the prefix ``fsdp_`` of its keys, and with booleans in place of their texts."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        key, value = str(name).removeprefix("fsdp_"), _flag(value)
        if settings.setdefault(key, value) != value:
            raise ConfigError(
                f"Cannot use fsdp_config with both {key!r} and {'fsdp_' + key!r}.",
                f"They are one key, with the values {settings[key]!r} and {value!r}.",
                "Remove one of the two.",
            )
    return settings


def convert_texts(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert the texts of booleans and numbers in settings, at any depth.

    Example:
        >>> convert_texts({"a": "True", "b": {"c": "5"}, "d": "0.5", "e": "1-b"})
        {'a': True, 'b': {'c': 5}, 'd': 0.5, 'e': '1-b'}
    """
    return {name: _converted(value) for name, value in settings.items()}


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return convert_texts(value)
    if not isinstance(value, str):
        return value
    if value.isdecimal():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdecimal() else _flag(value)


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        reason = f"It is not a JSON object ({value})."
        raise ConfigError(f"Cannot use {name}={text!r}.", reason, "Pass a dict, or text such as '{\"key\": 1}'.")
    return value


def _flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


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
