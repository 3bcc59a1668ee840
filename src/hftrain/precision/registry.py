"""Precisions by name."""

from __future__ import annotations

import torch

from hftrain.core.registry import Registry
from hftrain.precision.base import Precision

precisions: Registry[Precision] = Registry(
    "precision",
    group="hftrain.precisions",
    elsewhere={
        "16-mixed": "fp16",
        "16-true": "fp16_true",
        "16": "fp16",
        "32": "fp32",
        "32-true": "fp32",
        "64": "fp64",
        "64-true": "fp64",
        "bf16-mixed": "bf16",
        "bf16-true": "bf16_true",
        "bfloat16": "bf16",
        "float16": "fp16",
        "float32": "fp32",
        "half": "fp16",
        "no": "fp32",
        "torch.bfloat16": "bf16",
        "torch.float16": "fp16",
        "torch.float32": "fp32",
    },
    gone={
        f"apex_o{level}": (
            "NVIDIA removed amp from Apex in May 2025; torch's own mixed precision is its successor.",
            f"Use precision={successor!r}.",
        )
        for level, successor in enumerate(("fp32", "fp16", "fp16", "fp16_true"))
    },
)

precisions.register("fp32", "hftrain.precision.base:FullPrecision", summary="float32 throughout")
precisions.register(
    "tf32",
    "hftrain.precision.base:FullPrecision",
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
for _name, _dtype, _summary in (
    ("bf16_true", torch.bfloat16, "bfloat16 throughout, parameters included"),
    ("fp16_true", torch.float16, "float16 throughout, parameters included, without loss scaling"),
    ("fp64", torch.float64, "float64 throughout"),
):
    precisions.register(_name, "hftrain.precision.pure:PurePrecision", summary=_summary, name=_name, dtype=_dtype)
