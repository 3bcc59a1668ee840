"""Values that cannot work, one setting at a time."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from hftrain.arguments.enums import IntervalStrategy
from hftrain.arguments.fields import ArgumentFields
from hftrain.core.errors import ConfigError, suggest

# Smallest accepted value; a setting that is None is left open and passes.
_COUNTS: dict[str, int] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "torch_empty_cache_steps": 1,
    "eval_accumulation_steps": 1,
    "past_index": -1,
    "save_total_limit": 1,
    "seed": 0,
    "data_seed": 0,
    "local_rank": -1,
    "ddp_bucket_cap_mb": 1,
    "tpu_num_cores": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
}
_RANGES: dict[str, tuple[float, float]] = {
    "learning_rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "num_train_epochs": (-math.inf, math.inf),
    "warmup_ratio": (0, 1),
    "warmup_steps": (0, math.inf),
    "label_smoothing_factor": (0, 1),
    "neftune_noise_alpha": (0, math.inf),
    "eval_delay": (0, math.inf),
    "ddp_timeout": (1, math.inf),
}
_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "log_level": _LEVELS,
    "log_level_replica": _LEVELS,
    "half_precision_backend": ("auto", "cuda_amp", "cpu_amp", "apex"),
    "auto_find_batch_size": (True, False, "smaller_batch"),
    "fp16_opt_level": ("O0", "O1", "O2", "O3"),
    "dataloader_multiprocessing_context": (None, "fork", "spawn", "forkserver"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
    "include_num_input_tokens_seen": (True, False, None, "all", "non_padding"),
}
_INTERVALS = {"logging_steps": "logging_strategy", "eval_steps": "eval_strategy", "save_steps": "save_strategy"}


def check_values(args: ArgumentFields) -> None:
    """Refuse values that are wrong by themselves, whatever the other settings say.

    Raises:
        ConfigError: A number is out of range, or a name unknown.
    """
    for name, smallest in _COUNTS.items():
        _check_number(args, name, smallest, math.inf, kind=Integral)
    for name, (low, high) in _RANGES.items():
        _check_number(args, name, low, high, kind=Real)
    for name, choices in _CHOICES.items():
        _check_choice(name, getattr(args, name), choices)
    _check_flags(args)
    for include in args.include_for_metrics:
        _check_choice("include_for_metrics", include, ("inputs", "loss"))
    for name, strategy in _INTERVALS.items():
        _check_interval(args, name, strategy)
    _check_duration(args)


def _check_number(args: ArgumentFields, name: str, low: float, high: float, *, kind: Any) -> None:
    value: Any = getattr(args, name)
    if value is None or (isinstance(value, kind) and low <= value <= high):
        return
    noun = "an integer" if kind is Integral else "a number"
    bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    reason = f"It must be {noun} {bounds}." if isinstance(value, kind) else f"It must be {noun}."
    # YAML 1.1 reads 5e-5 as text.
    remedy = "Give a number; in YAML write 5.0e-5, not 5e-5." if isinstance(value, str) else f"Change {name}."
    raise ConfigError(f"{name}={value!r} was asked for.", reason, remedy)


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        known = [choice for choice in choices if isinstance(choice, str)]
        reason = f"{name} has no such value."
        raise ConfigError(f"{name}={value!r} was asked for.", reason, suggest(str(value), known))


def _check_flags(args: ArgumentFields) -> None:
    """Refuse text where a yes or a no is wanted: "false" is true."""
    for each in fields(args):
        value = getattr(args, each.name)
        if isinstance(value, str) and each.type in ("bool", "bool | None"):
            raise ConfigError(
                f"{each.name}={value!r} was asked for.",
                "It is a yes or a no, and text counts as a yes whatever it says.",
                "Use True or False; in YAML without quotation marks.",
            )


def _check_interval(args: ArgumentFields, name: str, strategy: str) -> None:
    value = getattr(args, name)
    if value is None or value == -1:
        return
    _check_number(args, name, 0, math.inf, kind=Real)
    if value > 1 and not float(value).is_integer():
        raise ConfigError(
            f"{name}={value!r} was asked for.",
            "Optimizer updates above 1 are counted in whole numbers; only values below 1 are shares of the run.",
            f"Use {name}={round(value)}, or a value below 1.",
        )
    if value == 0 and getattr(args, strategy) == IntervalStrategy.STEPS:
        raise ConfigError(
            f"{strategy}='steps' was asked for with {name}=0.",
            "Something cannot be due every 0 optimizer updates.",
            f"Set {name} to 1 or more, to a share below 1, or {strategy}='no'.",
            **{strategy: "steps", name: value},
        )


def _check_duration(args: ArgumentFields) -> None:
    if args.max_steps <= 0 and not args.num_train_epochs > 0:
        raise ConfigError(
            f"num_train_epochs={args.num_train_epochs!r} was asked for.",
            "A run needs a positive number of epochs or of optimizer updates.",
            "Set num_train_epochs or max_steps above 0; to evaluate only, do not call train().",
            num_train_epochs=args.num_train_epochs,
            max_steps=args.max_steps,
        )
