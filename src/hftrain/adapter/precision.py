"""Which precision."""

from __future__ import annotations

from typing import Any

from hftrain.core.errors import ConfigError, explain


def precision_request(args: Any, precision: str | None) -> tuple[str, dict[str, Any]]:
    """Return the precision's registry name and options.

    Args:
        args: The training arguments.
        precision: What the `precision=` keyword said; None leaves the choice to the arguments.

    Raises:
        ConfigError: The keyword contradicts an argument; both are named.
    """
    chosen = [name for name in ("fp16", "bf16") if getattr(args, name)]
    if precision is not None and chosen and not precision.startswith(chosen[0]):
        raise ConfigError(
            explain(
                f"precision={precision!r} was asked for together with {chosen[0]}=True.",
                "Both choose the numerics, and they differ.",
                "Keep one of the two.",
                precision=precision,
                **{chosen[0]: True},
            )
        )
    name = precision or (chosen[0] if chosen else "tf32" if args.tf32 else "fp32")
    options: dict[str, Any] = {}
    if args.tf32 is not None and name != "tf32":
        options["matmul"] = "high" if args.tf32 else "highest"
    return name, options
