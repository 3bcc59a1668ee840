"""Which strategy, with which options."""

from __future__ import annotations

import inspect
from typing import Any

from hftrain.core.errors import ConfigError, explain
from hftrain.core.log import get_logger
from hftrain.strategies.registry import strategies

logger = get_logger(__name__)

_DEFAULT_TIMEOUT_S = 1800
_STRATEGY_FIELDS = ("deepspeed", "fsdp", "sharded_ddp")


def strategy_request(args: Any, strategy: str | None, *, is_checkpointing: bool) -> tuple[str, dict[str, Any]]:
    """Return the strategy's registry name and options.

    Args:
        args: The training arguments.
        strategy: What the `strategy=` keyword said; None leaves the choice to the arguments and the launcher.
        is_checkpointing: Whether the model recomputes activations (decides `find_unused_parameters`, as documented).

    Raises:
        ConfigError: The keyword contradicts an argument that picks another strategy; both are named.
    """
    for field in _STRATEGY_FIELDS:
        value = getattr(args, field, None)
        if strategy is not None and value:
            raise ConfigError(
                explain(
                    f"strategy={strategy!r} was asked for together with {field}={value!r}.",
                    f"Both choose how processes share the model, and {field} means another strategy.",
                    "Keep one of the two.",
                    strategy=strategy,
                    **{field: value},
                )
            )
    name = strategy or ("ddp" if args.world_size > 1 else "single")
    wanted: dict[str, Any] = {
        "backend": args.ddp_backend,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "timeout_s": None if args.ddp_timeout == _DEFAULT_TIMEOUT_S else args.ddp_timeout,
    }
    wanted = {option: value for option, value in wanted.items() if value is not None}
    accepted = inspect.signature(strategies.resolve(name)[0]).parameters
    ignored = sorted(wanted.keys() - accepted.keys())
    if ignored:
        logger.warning(
            "strategy=%r runs without a process group, so these settings of it change nothing: %s.",
            name,
            ", ".join(f"{option}={wanted[option]!r}" for option in ignored),
        )
    # Documented defaults, which a strategy chosen by name replaces by its own.
    defaults: dict[str, Any] = {"use_cpu": args.use_cpu}
    if strategy is None:
        defaults["find_unused_parameters"] = not is_checkpointing
    if is_checkpointing:
        defaults["broadcast_buffers"] = False
    return name, {option: value for option, value in {**defaults, **wanted}.items() if option in accepted}
