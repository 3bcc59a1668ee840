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

    The first that is set decides: the keyword or `fp16`/`bf16`, the launcher, `tf32`. Without any it is fp32.

    Args:
        precision: The `precision=` keyword; None leaves the choice to the arguments and the launcher. An object keeps
            its own options.
    """
    flag = next((name for name in ("fp16", "bf16") if getattr(args, name)), None)
    if args.fp16_opt_level != "O1":
        warn_once("fp16_opt_level has no effect: it was a level of Apex's amp, which is gone.")
    keyword_name = precision.policy.name if isinstance(precision, Precision) else precision
    if args.half_precision_backend in ("cpu_amp", "cuda_amp") and not (flag or str(keyword_name) in ("fp16", "bf16")):
        warn_once(
            f"half_precision_backend={args.half_precision_backend!r} has no effect without fp16=True or bf16=True."
        )
    if keyword_name is not None and flag and keyword_name != flag:
        reason = f"Both choose the numerics, and they differ: {flag} means {flag!r} here."
        raise clash(f"precision={keyword_name!r}", f"{flag}=True", reason)
    explicit_name = keyword_name or flag
    # Set by `accelerate launch --mixed_precision` or its configuration file.
    launcher_name = launched("ACCELERATE_MIXED_PRECISION") or "no"
    if launcher_name != "no" and explicit_name not in (None, launcher_name):
        source = f"{flag}=True" if keyword_name is None else f"precision={keyword_name!r}"
        warn_once(
            f"The launcher's mixed precision has no effect (ACCELERATE_MIXED_PRECISION={launcher_name!r}): {source} "
            "takes precedence. Remove one of the two, or make them agree."
        )
    name = explicit_name or (launcher_name if launcher_name != "no" else "tf32" if args.tf32 else "fp32")
    if args.tf32 is None:
        return name, {}
    matmul = "high" if args.tf32 else "highest"
    preset = precision.policy.matmul if isinstance(precision, Precision) else precisions.resolve(name)[1].get("matmul")
    if preset == matmul:
        return name, {}
    if preset is not None or isinstance(precision, Precision) or not accepts(precisions.resolve(name)[0], "matmul"):
        reason = f"tf32={args.tf32} means matmul={matmul!r}, and this precision has matmul={preset!r}."
        raise clash(f"precision={name!r}", f"tf32={args.tf32}", reason)
    return name, {"matmul": matmul}
