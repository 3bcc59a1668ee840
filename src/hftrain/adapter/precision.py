"""Choice of the precision."""

from __future__ import annotations

from typing import Any

from hftrain.core.errors import clash
from hftrain.core.log import warn_once
from hftrain.core.signatures import accepts
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.strategies.environment import launched


def precision_request(args: Any, precision: str | Precision | None) -> tuple[str, dict[str, Any]]:
    """Return the precision's registry name and options.

    Args:
        precision: The `precision=` keyword; None leaves the choice to the arguments and the launcher. An object keeps
            its own options.
    """
    chosen = [name for name in ("fp16", "bf16") if getattr(args, name)]
    if args.fp16_opt_level != "O1":
        warn_once("fp16_opt_level has no effect: it was a level of Apex's amp, which is gone.")
    asked = precision.policy.name if isinstance(precision, Precision) else precision
    if args.half_precision_backend in ("cpu_amp", "cuda_amp") and not (chosen or str(asked) in ("fp16", "bf16")):
        warn_once(
            f"half_precision_backend={args.half_precision_backend!r} has no effect without fp16=True or bf16=True."
        )
    if asked is not None and chosen and asked != chosen[0]:
        reason = f"Both choose the numerics, and they differ: {_field(args)} means {chosen[0]!r} here."
        raise clash(f"precision={asked!r}", f"{_field(args)}=True", reason)
    said = asked or next(iter(chosen), None)
    # Set by `accelerate launch --mixed_precision` or its configuration file.
    wanted = launched("ACCELERATE_MIXED_PRECISION") or "no"
    if wanted != "no" and said not in (None, wanted):
        acting = f"{_field(args)}=True" if asked is None else f"precision={said!r}"
        warn_once(
            f"The launcher's mixed precision has no effect (ACCELERATE_MIXED_PRECISION={wanted!r}): {acting} takes "
            "precedence. Remove one of the two, or make them agree."
        )
    name = said or (wanted if wanted != "no" else "tf32" if args.tf32 else "fp32")
    if args.tf32 is None:
        return name, {}
    matmul = "high" if args.tf32 else "highest"
    own = precision.policy.matmul if isinstance(precision, Precision) else precisions.resolve(name)[1].get("matmul")
    if own == matmul:
        return name, {}
    if own is not None or isinstance(precision, Precision) or not accepts(precisions.resolve(name)[0], "matmul"):
        reason = f"tf32={args.tf32} means matmul={matmul!r}, and this precision has matmul={own!r}."
        raise clash(f"precision={name!r}", f"tf32={args.tf32}", reason)
    return name, {"matmul": matmul}


def _field(args: Any) -> str:
    return "fp16" if args.fp16 else "bf16"
