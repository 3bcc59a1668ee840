"""What `accelerator_config` says besides how loaders are shared: accumulation, copies to the device, the state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hftrain.adapter.data import read_accelerator_config
from hftrain.arguments.accelerator import AcceleratorConfig
from hftrain.core.errors import ConfigError, suggest

_SWITCHES = ("split_batches", "even_batches", "use_seedable_sampler", "non_blocking", "use_configured_state")
# Values that say what hftrain does anyway; why it cannot do otherwise.
_FIXED = {
    "adjust_scheduler": "The schedule counts optimizer updates, so it is always adjusted to the accumulation.",
    "sync_with_dataloader": "Gradients are never carried into the next epoch: its last update takes what is left.",
}
_ACCUMULATION = ("num_steps", "sync_each_batch", *_FIXED)


def settle_sharing(args: Any) -> None:
    """Read and check `accelerator_config`, and let its `num_steps` be `gradient_accumulation_steps`; mutates `args`.

    Raises:
        ConfigError: A key is unknown, a value is of the wrong kind or cannot be, or `num_steps` contradicts
            `gradient_accumulation_steps`.
    """
    if isinstance(args.accelerator_config, (str, Path)):
        args.accelerator_config = AcceleratorConfig.from_json_file(args.accelerator_config)
    config = read_accelerator_config(args)
    for key in _SWITCHES:
        if not isinstance(config.get(key, False), bool):
            raise _refused(key, config[key], "It is neither true nor false.", "Use True or False.")
    if config.get("dispatch_batches") not in (None, True, False):
        reason = "It is neither true, false nor null."
        raise _refused("dispatch_batches", config["dispatch_batches"], reason, "Use True, False or None.")
    accumulation = _accumulation(config)
    num_steps = accumulation.get("num_steps", args.gradient_accumulation_steps)
    if args.gradient_accumulation_steps not in (1, num_steps):
        reason = f"gradient_accumulation_steps={args.gradient_accumulation_steps} says otherwise."
        raise _refused("num_steps", num_steps, reason, "Keep one of the two.")
    args.gradient_accumulation_steps = num_steps


def syncs_each_batch(args: Any) -> bool:
    """Tell whether ranks exchange gradients after each micro-batch, which takes time but less memory."""
    return bool(_accumulation(read_accelerator_config(args)).get("sync_each_batch", False))


def non_blocking_copies(args: Any) -> bool | None:
    """Tell whether batches are copied to the device without waiting; None leaves it to the strategy."""
    value = read_accelerator_config(args).get("non_blocking")
    return None if value is None else bool(value)


def check_configured_state(args: Any, planned_device: torch.device) -> None:
    """Refuse `use_configured_state=True` where accelerate's state is missing, or is about another device.

    Raises:
        ConfigError: It is.
    """
    if not read_accelerator_config(args).get("use_configured_state", False):
        return
    from accelerate import PartialState

    if not PartialState._shared_state:
        raise _refused(
            "use_configured_state",
            True,
            "accelerate has no initialized state.",
            "Make an accelerate.PartialState or Accelerator first, or leave the setting out.",
        )
    configured = PartialState().device
    if configured.type != planned_device.type:
        raise _refused(
            "use_configured_state",
            True,
            f"accelerate's state is on {configured.type}, and the strategy on {planned_device.type}.",
            "Make the state with cpu=True for use_cpu=True, and without both else.",
        )


def _accumulation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    given = config.get("gradient_accumulation_kwargs") or {}
    if not isinstance(given, Mapping):
        reason = "It is not a mapping of settings."
        raise _refused("gradient_accumulation_kwargs", given, reason, "Give a dict, such as {'sync_each_batch': True}.")
    for key, value in given.items():
        if key not in _ACCUMULATION:
            reason = "gradient_accumulation_kwargs has no such key."
            raise _refused(key, value, reason, suggest(str(key), _ACCUMULATION))
        if key in _FIXED and value is not True:
            raise _refused(key, value, _FIXED[key], "Leave it out, or set it to True.")
    num_steps = given.get("num_steps", 1)
    if type(num_steps) is not int or num_steps < 1:
        raise _refused("num_steps", num_steps, "It counts micro-batches.", "Use a whole number of at least 1.")
    return given


def _refused(key: Any, value: Any, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"accelerator_config={{{key!r}: ...}} was given.", reason, remedy, **{str(key): value})
