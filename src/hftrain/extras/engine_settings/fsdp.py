"""The documented `fsdp` and `fsdp_config` as options of the strategy."""

from __future__ import annotations

import os
from typing import Any

from hftrain.adapter.strategy import FSDP_LAUNCHED
from hftrain.arguments.normalize import strip_fsdp
from hftrain.core.errors import ConfigError, check_known, read_json, suggest
from hftrain.core.launcher import is_set, read_launch
from hftrain.strategies.checks import warn_of_wrapper

_SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_XLA_KEYS = ("xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2")
# Keys that are options of the strategy, most of them with the same name.
_SAME_NAMES = (
    *("min_num_params", "forward_prefetch", "sync_module_states", "cpu_ram_efficient_loading"),
    *("activation_checkpointing", "state_dict_type", "reshard_after_forward"),
)
_OPTIONS = {"transformer_layer_cls_to_wrap": "layer_classes", **{name: name for name in _SAME_NAMES}}
_KEYS = (*_OPTIONS, *_XLA_KEYS, "backward_prefetch", "limit_all_gathers", "use_orig_params", "version")
# Keys of accelerate's own config file, and keys that have another name here.
_ACCELERATE_KEYS = ("compute_environment", "config", "distributed_type", "mixed_precision", "num_processes")
_ACCELERATE_REMEDY = "That is a key of accelerate's config file: pass the file to `accelerate launch --config_file`."
_REMEDIES = {
    "auto_wrap_policy": "Set min_num_params or transformer_layer_cls_to_wrap; each chooses a policy.",
    "offload_params": "Set fsdp='full_shard offload'.",
    "sharding_strategy": "Set fsdp='full_shard', 'shard_grad_op' or 'hybrid_shard'.",
    "transformer_cls_to_wrap": "Use transformer_layer_cls_to_wrap.",
}
_FLAGS = (
    *("forward_prefetch", "sync_module_states", "cpu_ram_efficient_loading", "activation_checkpointing"),
    *("limit_all_gathers", "use_orig_params"),
)
# As documented; one page has the spelling "backward_pos".
_BACKWARD_PREFETCH = ("backward_pre", "backward_post", "backward_pos", "no_prefetch")


def fsdp_options(args: Any, name: str | None) -> dict[str, Any]:
    """Return the options of `FSDPStrategy` that the arguments set.

    Args:
        name: The name by which the strategy was chosen; None if `fsdp` chose it.
    """
    words, settings = _requested_settings(args)
    if name is None and read_launch().launcher is None:
        raise ConfigError(
            f"Cannot use fsdp={' '.join(words)!r}.",
            "It splits a model among processes, and there is one, which no launcher started.",
            "Start with torchrun or `accelerate launch`, or leave fsdp out.",
            fsdp=words,
        )
    config = read_fsdp_config(settings)
    _check_config(args, config, words)
    unused = [f"strategy={name!r}"] if name == "fsdp1" else []
    unused += [f"fsdp_config's {key}={config[key]!r}" for key in _wrapper_keys(config)]
    if unused:
        warn_of_wrapper(unused)
    options = {_OPTIONS[key]: value for key, value in config.items() if key in _OPTIONS}
    if isinstance(options.get("state_dict_type"), str):
        options["state_dict_type"] = options["state_dict_type"].upper()
    if isinstance(options.get("layer_classes"), str):
        options["layer_classes"] = [name.strip() for name in options["layer_classes"].split(",")]
    if words:
        is_cut = bool(config.get("min_num_params") or options.get("layer_classes"))
        options["sharding"] = next((word for word in words if word in _SHARDINGS), _SHARDINGS[0])
        options["offload"], options["auto_wrap"] = "offload" in words, "auto_wrap" in words or is_cut
    return options


def _requested_settings(args: Any) -> tuple[list[str], Any]:
    """Return `fsdp` and `fsdp_config`, or the launcher's if both are unset."""
    words, settings = [str(word) for word in args.fsdp or ()], args.fsdp_config
    return _from_launcher() if is_set(FSDP_LAUNCHED) and not words and not settings else (words, settings)


def _wrapper_keys(config: dict[str, Any]) -> list[str]:
    """Return the keys whose values ask for what only torch's older wrapper did."""
    requests = {
        "version": str(config.get("version", 2)) == "1",
        "backward_prefetch": _prefetch(config) != "backward_pre",
        "limit_all_gathers": config.get("limit_all_gathers") is False,
        "use_orig_params": config.get("use_orig_params") is False,
    }
    return [key for key, is_requested in requests.items() if is_requested]


def _prefetch(config: dict[str, Any]) -> str:
    return str(config.get("backward_prefetch") or "backward_pre").lower()


def read_fsdp_config(settings: Any) -> dict[str, Any]:
    """Return `fsdp_config` as a dict: the documented prefix ``fsdp_`` is removed, and booleans may be text."""
    if isinstance(settings, str):
        remedy = "Pass the path of a JSON file, or a dict."
        if settings.endswith(("yaml", "yml")):
            remedy = "A YAML file of accelerate's is for `accelerate launch --config_file`."
        settings = read_json(settings, f"Cannot read fsdp_config={settings!r} as JSON:", remedy)
    if not isinstance(settings or {}, dict):
        kind = type(settings).__name__
        raise ConfigError(f"Cannot use a {kind} as fsdp_config.", "", "Pass a JSON object, or a dict.")
    config = strip_fsdp(settings or {})
    for key in config:
        if key not in _KEYS:
            remedy = _REMEDIES.get(key) or (_ACCELERATE_REMEDY if key in _ACCELERATE_KEYS else suggest(key, _KEYS))
            raise ConfigError(f"Cannot use fsdp_config={{{key!r}: ...}}: there is no such key.", "", remedy)
    return {key: value for key, value in config.items() if value is not None}


def _from_launcher() -> tuple[list[str], dict[str, Any]]:
    """Return the settings of `accelerate launch` in the environment, in the form of `fsdp` and `fsdp_config`."""
    settings = {name.removeprefix("FSDP_"): value for name, value in os.environ.items() if name.startswith("FSDP_")}
    sharding = settings.get("SHARDING_STRATEGY", "FULL_SHARD")
    if settings.get("VERSION") == "2":
        sharding = "FULL_SHARD" if settings.get("RESHARD_AFTER_FORWARD", "true") == "true" else "SHARD_GRAD_OP"
    if sharding in ("1", "2", "3", "4", "5"):
        sharding = _SHARDINGS[int(sharding) - 1]
    words = [sharding.lower()]
    problem = f"Cannot use FSDP_SHARDING_STRATEGY={sharding!r}, which the launcher set."
    check_known(words[0], _SHARDINGS, problem, "There is no such sharding.")
    for name in ("ACTIVATION_CHECKPOINTING_OFFLOAD", "IGNORED_MODULES"):
        if settings.get(name, "false").lower() not in ("", "false", "none"):
            raise ConfigError(
                f"Cannot use FSDP_{name}={settings[name]!r}, which the launcher set.",
                "The strategy has no such option.",
                f"Leave fsdp_{name.lower()} out of accelerate's configuration.",
            )
    if settings.get("OFFLOAD_PARAMS", "false").lower() == "true":
        words.append("offload")
    names = {
        key.upper(): key for key in (*_FLAGS, "backward_prefetch", "state_dict_type") if key != "limit_all_gathers"
    }
    config: dict[str, Any] = {names[name]: value for name, value in settings.items() if name in names}
    policy = settings.get("AUTO_WRAP_POLICY", "NO_WRAP")
    if policy != "NO_WRAP":
        words.append("auto_wrap")
    if policy == "SIZE_BASED_WRAP":
        config["min_num_params"] = int(settings.get("MIN_NUM_PARAMS", "0"))
    elif settings.get("TRANSFORMER_CLS_TO_WRAP"):
        config["transformer_layer_cls_to_wrap"] = settings["TRANSFORMER_CLS_TO_WRAP"]
    return words, config


def _check_config(args: Any, config: dict[str, Any], words: list[str]) -> None:
    xla_keys = [key for key in _XLA_KEYS if config.get(key)]
    if xla_keys:
        reason = "It belongs to FSDP on XLA devices, and this is the FSDP of other ones."
        raise _refuse(xla_keys[0], config, reason, "Leave it out, or set the key xla and no other strategy.")
    if str(config.get("version", 2)) not in ("1", "2"):
        raise _refuse("version", config, "torch has two versions of FSDP.", "Leave it out.")
    for key in _FLAGS:
        if not isinstance(config.get(key, False), bool):
            raise _refuse(key, config, "It must be true or false.", "")
    minimum = config.get("min_num_params", 0)
    if isinstance(minimum, bool) or not isinstance(minimum, int) or minimum < 0:
        raise _refuse("min_num_params", config, "It must be a number of parameters.", "Use an integer such as 100000.")
    if _prefetch(config) not in _BACKWARD_PREFETCH:
        remedy = suggest(_prefetch(config), _BACKWARD_PREFETCH)
        raise _refuse("backward_prefetch", config, "There is no such choice.", remedy)
    if config.get("activation_checkpointing") and args.gradient_checkpointing:
        reason = "gradient_checkpointing=True recomputes the same activations."
        raise _refuse("activation_checkpointing", config, reason, "Keep activation_checkpointing alone.")
    shardings = {word for word in words if word in _SHARDINGS}
    reshards_by_default = not shardings or bool(shardings & {"full_shard", "hybrid_shard"})
    reshards = config.get("reshard_after_forward", reshards_by_default)
    if not isinstance(reshards, int) or (shardings and bool(reshards) != reshards_by_default):
        reason = f"It must be true, false or a number of processes, and agree with fsdp={' '.join(shardings)!r}."
        raise _refuse("reshard_after_forward", config, reason, "Leave it out: the sharding decides.")


def _refuse(key: str, config: dict[str, Any], reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"Cannot use fsdp_config={{{key!r}: {config.get(key)!r}}}.", reason, remedy)
