"""Settings of `accelerator_config` other than those of loaders: accumulation, device copies and the state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.adapter.data import read_accelerator_config
from hftrain.arguments.accelerator import AcceleratorConfig
from hftrain.core.errors import ConfigError, suggest

_SWITCHES = ("split_batches", "even_batches", "use_seedable_sampler", "non_blocking", "use_configured_state")
# Settings that can only be True, and why.
_FIXED = {
    "adjust_scheduler": "The schedule counts optimizer updates, so it is always adjusted to the accumulation.",
    "sync_with_dataloader": "Gradients are never carried into the next epoch: its last update takes what is left.",
}
_ACCUMULATION = ("num_steps", "sync_each_batch", *_FIXED)


def resolve_sharing(args: Any) -> None:
    """Read and check `accelerator_config`; set `gradient_accumulation_steps` to its `num_steps`. Mutates `args`."""
    if isinstance(args.accelerator_config, (str, Path)):
        args.accelerator_config = AcceleratorConfig.from_json_file(args.accelerator_config)
    config = read_accelerator_config(args)
    for key in _SWITCHES:
        if not isinstance(config.get(key, False), bool):
            raise refused_key(key, config[key], "It is neither true nor false.", "Use True or False.")
    if config.get("dispatch_batches") not in (None, True, False):
        reason = "It is neither true, false nor null."
        raise refused_key("dispatch_batches", config["dispatch_batches"], reason, "Use True, False or None.")
    accumulation = _accumulation(config)
    num_steps = accumulation.get("num_steps", args.gradient_accumulation_steps)
    if args.gradient_accumulation_steps not in (1, num_steps):
        reason = f"gradient_accumulation_steps={args.gradient_accumulation_steps} differs from it."
        raise refused_key("num_steps", num_steps, reason, "Keep one of the two.")
    args.gradient_accumulation_steps = num_steps


def syncs_each_batch(args: Any) -> bool:
    """Return whether ranks exchange gradients after each micro-batch, which is slower but needs less memory."""
    return bool(_accumulation(read_accelerator_config(args)).get("sync_each_batch", False))


def non_blocking_copies(args: Any) -> bool | None:
    """Return whether batches are copied to the device without waiting; None leaves it to the strategy."""
    value = read_accelerator_config(args).get("non_blocking")
    return None if value is None else bool(value)


def _accumulation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    given = config.get("gradient_accumulation_kwargs") or {}
    if not isinstance(given, Mapping):
        reason = "It is not a mapping of settings."
        remedy = "Give a dict, such as {'sync_each_batch': True}."
        raise refused_key("gradient_accumulation_kwargs", given, reason, remedy)
    for key, value in given.items():
        if key not in _ACCUMULATION:
            reason = "gradient_accumulation_kwargs has no such key."
            raise refused_key(key, value, reason, suggest(str(key), _ACCUMULATION))
        if key in _FIXED and value is not True:
            raise refused_key(key, value, _FIXED[key], "Leave it out, or set it to True.")
    num_steps = given.get("num_steps", 1)
    if type(num_steps) is not int or num_steps < 1:
        raise refused_key("num_steps", num_steps, "It counts micro-batches.", "Use a whole number of at least 1.")
    return given


def refused_key(key: Any, value: Any, reason: str, remedy: str) -> ConfigError:
    """Return the error for an invalid key of `accelerator_config`."""
    return ConfigError(f"Cannot use accelerator_config={{{key!r}: ...}}.", reason, remedy, **{str(key): value})
