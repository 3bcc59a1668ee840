"""Which strategy, with which options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from hftrain.adapter.fsdp import fsdp_options, launcher_asks
from hftrain.adapter.xla import asks_for_xla, has_xla_config, xla_options
from hftrain.core.errors import ConfigError, explain
from hftrain.core.log import get_logger
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import strategies

logger = get_logger(__name__)

_DEFAULT_TIMEOUT_S = 1800
# What `accelerate launch` sets for the engines it can configure.
_LAUNCHER_ENGINES = {"ACCELERATE_USE_FSDP": "fsdp", "ACCELERATE_USE_DEEPSPEED": "deepspeed"}
_STRATEGY_FIELDS = ("deepspeed", "fsdp", "sharded_ddp", "tpu_num_cores")


def strategy_request(
    args: Any, strategy: str | Strategy | None, *, is_checkpointing: bool
) -> tuple[str, dict[str, Any]]:
    """Return the strategy's registry name and options.

    Args:
        args: The training arguments.
        strategy: What the `strategy=` keyword said; None and ``"auto"`` leave the choice to the arguments and the
            launcher. An object keeps the options it was made with.
        is_checkpointing: Whether the model recomputes activations (decides `find_unused_parameters`, as documented).

    Raises:
        ConfigError: The keyword contradicts an argument; both are named.
    """
    is_object = isinstance(strategy, Strategy)
    chosen = _name_of(strategy)
    for field in _STRATEGY_FIELDS:
        value = getattr(args, field, None)
        is_for_xla = field == "tpu_num_cores" or (field == "fsdp" and has_xla_config(args))
        fits = _is_xla(chosen) if is_for_xla else field == "fsdp" and _is_fsdp(strategy)
        if chosen is not None and value and not fits:
            raise ConfigError(
                explain(
                    f"strategy={chosen!r} was asked for together with {field}={value!r}.",
                    f"Both choose how processes share the model, and {field} means another strategy.",
                    "Keep one of the two.",
                    strategy=chosen,
                    **{field: value},
                )
            )
    _check_launcher(may_be_fsdp=chosen is None or _is_fsdp(strategy))
    if chosen is None and asks_for_xla(args):
        chosen = "xla"
    name = chosen or ("fsdp" if args.fsdp or launcher_asks() else "ddp" if args.world_size > 1 else "single")
    wanted: dict[str, Any] = {
        "backend": args.ddp_backend,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "timeout_s": None if args.ddp_timeout == _DEFAULT_TIMEOUT_S else args.ddp_timeout,
    }
    wanted = {option: value for option, value in wanted.items() if value is not None}
    if name == "fsdp" or _is_fsdp(strategy):
        wanted.update(fsdp_options(args, is_named=chosen is not None))
    if _is_xla(name):
        wanted.update(xla_options(args))
    if not is_object:
        _check_preset(name, wanted)
    accepts = _accepted_options(None if is_object else name)
    ignored = sorted(option for option in wanted if not accepts(option))
    if ignored:
        logger.warning(
            "strategy=%r %s, so these settings change nothing: %s.",
            name,
            "was given as an object" if is_object else "does not take them",
            ", ".join(f"{option}={wanted[option]!r}" for option in ignored),
        )
    # Documented defaults, which a strategy chosen by name replaces by its own.
    defaults: dict[str, Any] = {"use_cpu": args.use_cpu, "place_model": bool(args.place_model_on_device)}
    if chosen is None:
        defaults["find_unused_parameters"] = not is_checkpointing
    if is_checkpointing:
        defaults["broadcast_buffers"] = False
    return name, {option: value for option, value in {**defaults, **wanted}.items() if accepts(option)}


def _is_fsdp(strategy: str | Strategy | None) -> bool:
    """Tell whether a strategy takes the options of FSDP."""
    if isinstance(strategy, Strategy) or strategy in (None, "auto"):
        return any(vars(kind).get("name") == "fsdp" for kind in type(strategy).__mro__)
    return "sharding" in inspect.signature(strategies.resolve(str(strategy))[0]).parameters


def _is_xla(name: str | None) -> bool:
    return name in ("xla", "xla_fsdp", "xla_fsdp_v2")


def _name_of(strategy: str | Strategy | None) -> str | None:
    if isinstance(strategy, Strategy):
        return strategy.name or type(strategy).__name__
    return None if strategy == "auto" else strategy


def _check_preset(name: str, wanted: dict[str, Any]) -> None:
    """Raise where an argument takes back what a strategy's name says."""
    for option, value in strategies.resolve(name)[1].items():
        if wanted.get(option, value) != value:
            shown = f"ddp_{option}" if option == "find_unused_parameters" else option
            raise ConfigError(
                explain(
                    f"strategy={name!r} was asked for together with {shown}={wanted[option]!r}.",
                    f"The name means {option}={value!r}.",
                    "Keep one of the two.",
                    strategy=name,
                    **{shown: wanted[option]},
                )
            )


def _accepted_options(name: str | None) -> Callable[[str], bool]:
    """Return what tells whether a strategy is made with an option; one that is made already takes none."""
    accepted = {} if name is None else inspect.signature(strategies.resolve(name)[0]).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    return lambda option: takes_any or option in accepted


def _check_launcher(*, may_be_fsdp: bool) -> None:
    """Raise where `accelerate launch` was told to use an engine that is not here: plain DDP would train instead."""
    for variable, engine in _LAUNCHER_ENGINES.items():
        if engine == "fsdp" and may_be_fsdp:
            continue
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise ConfigError(
                explain(
                    f"The launcher asked for {engine} ({variable}={os.environ[variable]}).",
                    f"strategy={engine!r} is not the one that was chosen, or not wired in this version.",
                    "Launch with torchrun, or without that option of accelerate launch.",
                )
            )
