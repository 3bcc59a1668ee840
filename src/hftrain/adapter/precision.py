"""Which precision."""

from __future__ import annotations

import inspect
import os
from typing import Any

from hftrain.core.errors import ConfigError, explain
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions


def precision_request(args: Any, precision: str | Precision | None) -> tuple[str, dict[str, Any]]:
    """Return the precision's registry name and options.

    Args:
        args: The training arguments.
        precision: What the `precision=` keyword said; None leaves the choice to the arguments. An object keeps the
            options it was made with.

    Raises:
        ConfigError: The keyword contradicts an argument or cannot heed it; both are named.
    """
    chosen = [name for name in ("fp16", "bf16") if getattr(args, name)]
    asked = precision.policy.name if isinstance(precision, Precision) else precision
    if asked is not None and chosen and not asked.startswith(chosen[0]):
        raise ConfigError(
            explain(
                f"precision={asked!r} was asked for together with {chosen[0]}=True.",
                "Both choose the numerics, and they differ.",
                "Keep one of the two.",
                precision=asked,
                **{chosen[0]: True},
            )
        )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked is None and not chosen and launched != "no":
        # What `accelerate launch --mixed_precision` or its configuration file says.
        chosen = [launched]
    name = asked or (chosen[0] if chosen else "tf32" if args.tf32 else "fp32")
    if args.tf32 is None:
        return name, {}
    matmul = "high" if args.tf32 else "highest"
    own = precision.policy.matmul if isinstance(precision, Precision) else precisions.resolve(name)[1].get("matmul")
    if own == matmul:
        return name, {}
    if own is not None or isinstance(precision, Precision) or not _takes_matmul(name):
        raise ConfigError(
            explain(
                f"precision={name!r} was asked for together with tf32={args.tf32}.",
                f"tf32={args.tf32} means matmul={matmul!r}, and this precision has matmul={own!r}.",
                "Keep one of the two.",
                precision=name,
                tf32=args.tf32,
            )
        )
    return name, {"matmul": matmul}


def _takes_matmul(name: str) -> bool:
    parameters = inspect.signature(precisions.resolve(name)[0]).parameters
    return "matmul" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
