"""DeepSpeed settings from the arguments and the launcher, and models that ZeRO-3 splits during construction."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from hftrain.adapter.data import total_batch_size
from hftrain.adapter.strategy import DEEPSPEED_LAUNCHED, FSDP_LAUNCHED
from hftrain.core.errors import ConfigError, clash
from hftrain.core.extras import is_available
from hftrain.core.launcher import is_set
from hftrain.core.log import warn_once
from hftrain.core.types import PrecisionPolicy
from hftrain.precision.base import Precision
from hftrain.strategies.base import Strategy
from hftrain.strategies.deepspeed.config import Fill, find
from hftrain.strategies.deepspeed.strategy import DeepSpeedStrategy

_TRUE_TEXTS = ("1", "true", "yes")
_HALF_PRECISIONS = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}


def deepspeed_options(args: Any) -> dict[str, Any]:
    """Return the options of a strategy chosen by name: the config of the arguments, else of the launcher."""
    conflict = f"fsdp={args.fsdp!r}" if args.fsdp else "the launcher's FSDP" if is_set(FSDP_LAUNCHED) else None
    if conflict is not None:
        raise clash("DeepSpeed", conflict, "Both choose how processes share the model.")
    config = args.deepspeed or (_from_launcher() if is_set(DEEPSPEED_LAUNCHED) else None)
    return {"config": config}


def fill_deepspeed_config(args: Any, strategy: Strategy, precision: Precision) -> None:
    """Fill a DeepSpeed strategy's config from the arguments; other strategies are left alone. Mutates the strategy."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return
    # Called by `Trainer.propagate_args_to_deepspeed` after arguments have changed.
    strategy.propagate_args = partial(_propagate, strategy, precision.policy)  # type: ignore[attr-defined]
    _propagate(strategy, precision.policy, args)
    _warn_of_what_the_config_makes(args, strategy)


def _propagate(
    strategy: DeepSpeedStrategy, policy: PrecisionPolicy, args: Any, *, auto_find_batch_size: bool = False
) -> None:
    half = _HALF_PRECISIONS.get(str(policy.compute_dtype))
    values = run_values(args, world_size=strategy.world_size, has_found_batch_size=auto_find_batch_size)
    strategy.fill_config(values, half=half)


def run_values(args: Any, *, world_size: int, has_found_batch_size: bool = False) -> list[Fill]:
    """Return the values of the config's keys given by the arguments.

    Args:
        has_found_batch_size: Whether the batch size was searched for and overrides the config's.

    Source: the documented "auto" values.
    """
    total, steps = total_batch_size(args, world_size=world_size), args.gradient_accumulation_steps
    micro, name = total // (steps * world_size), f"per_device_train_batch_size={args.per_device_train_batch_size}"
    batch: dict[str, Any] = {"creates": True, "must_match": not has_found_batch_size}
    return [
        Fill(key="train_micro_batch_size_per_gpu", value=micro, name=name, **batch),
        Fill(key="gradient_accumulation_steps", value=steps, name="gradient_accumulation_steps", creates=True),
        Fill(key="train_batch_size", value=total, name="all processes' samples per update", **batch),
        Fill(key="gradient_clipping", value=args.max_grad_norm or 0.0, name="max_grad_norm", creates=True),
        Fill(key="amp.enabled", value=False, name="half_precision_backend"),
        Fill(key="amp.opt_level", value=args.fp16_opt_level, name="fp16_opt_level"),
        Fill(key="scheduler.params.warmup_min_lr", value=0, name="warm-up", must_match=False),
        Fill(key="scheduler.params.warmup_max_lr", value=args.learning_rate, name="learning_rate"),
        Fill(key="zero_optimization.stage3_gather_16bit_weights_on_model_save", value=False, name="", must_match=False),
        Fill(key="optimizer.params.lr", value=args.learning_rate, name="learning_rate"),
        Fill(key="optimizer.params.betas", value=[args.adam_beta1, args.adam_beta2], name="adam_beta1 and adam_beta2"),
        Fill(key="optimizer.params.eps", value=args.adam_epsilon, name="adam_epsilon"),
        Fill(key="optimizer.params.weight_decay", value=args.weight_decay, name="weight_decay"),
    ]


def _warn_of_what_the_config_makes(args: Any, strategy: DeepSpeedStrategy) -> None:
    defaults = {field.name: field.default for field in fields(args)}
    for part, name in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        value = getattr(args, name)
        # Many scripts set a variant of the default explicitly.
        if part in strategy.makes and value != defaults[name] and not str(value).startswith("adamw_torch"):
            type_name = find(strategy.config, f"{part}.type")
            warn_once(f"{name}={str(value)!r} changes nothing: the DeepSpeed config makes the {part}, {type_name}.")


def _from_launcher() -> dict[str, Any] | str:
    """Return the config that `accelerate launch` set in the environment: a file or single settings."""
    settings = {
        name.removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_").lower(): value
        for name, value in os.environ.items()
        if name.startswith(("ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_")) and value.lower() not in ("", "none")
    }
    if "config_file" in settings:
        return str(Path(settings["config_file"]))
    zero: dict[str, Any] = {"stage": int(settings.get("zero_stage", 2))}
    for part in ("optimizer", "param"):
        device = settings.get(f"offload_{part}_device")
        if device is not None:
            path = settings.get(f"offload_{part}_nvme_path")
            zero[f"offload_{part}"] = {"device": device, **({"nvme_path": path} if path and device == "nvme" else {})}
    if settings.get("zero3_save_16bit_model", "false").lower() in _TRUE_TEXTS:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config: dict[str, Any] = {"zero_optimization": zero}
    clipping = settings.get("gradient_clipping", "auto")
    config["gradient_clipping"] = clipping if clipping == "auto" else float(clipping)
    # The launcher sets 1 by default.
    steps = settings.get("gradient_accumulation_steps", "1")
    config["gradient_accumulation_steps"] = "auto" if steps in ("1", "auto") else int(steps)
    return config


class HfDeepSpeedConfig:
    """Make transformers partition new models with ZeRO-3 layer by layer, so no process holds a whole model.

    Keep a reference to the object while building models. It has no effect with other ZeRO stages. Creating it is
    collective.

    Args:
        config_or_args: The training arguments, whose `deepspeed` is used, or a DeepSpeed config as a dict or a path.

    Attributes:
        config: The DeepSpeed config, its "auto" values filled from the arguments or left out.

    Raises:
        ConfigError: The arguments have no DeepSpeed config, or the config is invalid.
        MissingDependencyError: DeepSpeed is not installed.

    Source: the documented `HfDeepSpeedConfig`.
    """

    def __init__(self, config_or_args: Any) -> None:
        args = config_or_args if hasattr(config_or_args, "per_device_train_batch_size") else None
        config = config_or_args if args is None else deepspeed_options(args)["config"]
        if not config:
            raise ConfigError(
                "Cannot make a HfDeepSpeedConfig from these arguments:",
                "they hold no DeepSpeed config.",
                "Set deepspeed to a dict or the path of a JSON file, or pass that instead of the arguments.",
            )
        options = {} if args is None else {"use_cpu": args.use_cpu, "backend": args.ddp_backend}
        self._strategy = DeepSpeedStrategy(config=config, **options)
        if args is not None:
            half = "bf16" if args.bf16 else "fp16" if args.fp16 else None
            self._strategy.fill_config(run_values(args, world_size=self._strategy.world_size), half=half)
        self.config = _without_auto(self._strategy.config)
        if "train_batch_size" not in self.config:
            self.config.setdefault("train_micro_batch_size_per_gpu", 1)
        self._strategy.launch()
        if is_available("transformers"):
            from transformers.integrations.deepspeed import set_hf_deepspeed_config

            # A weak reference: models built after this object is deleted are not partitioned.
            set_config: Callable[[Any], Any] = set_hf_deepspeed_config
            set_config(self)

    def is_zero3(self) -> bool:
        """Return whether parameters are partitioned."""
        return self._strategy.stage == 3


def _without_auto(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_auto(value) for key, value in config.items() if value != "auto"}
