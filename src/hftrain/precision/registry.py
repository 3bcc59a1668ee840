"""Precisions by name."""

from __future__ import annotations

from hftrain.core.registry import Registry
from hftrain.precision.base import Precision

precisions: Registry[Precision] = Registry("precision", group="hftrain.precisions")

precisions.register("fp32", "hftrain.precision.full:FullPrecision", summary="float32 throughout")
precisions.register(
    "tf32",
    "hftrain.precision.full:FullPrecision",
    summary="float32, with TF32 inside matrix products and convolutions",
    matmul="high",
)
precisions.register(
    "bf16", "hftrain.precision.autocast:AutocastPrecision", summary="float32 parameters, bfloat16 operations"
)
precisions.register(
    "fp16",
    "hftrain.precision.autocast:ScaledPrecision",
    summary="float32 parameters, float16 operations, a scaled loss",
)
