"""Precisions by name."""

from __future__ import annotations

from typing import Any

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
)

_FULL, _PURE = "base:FullPrecision", "pure:PurePrecision"
# Name, location in this package, summary, options.
_BUILT_IN: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("fp32", _FULL, "float32 throughout", {}),
    ("tf32", _FULL, "float32, with TF32 inside matrix products and convolutions", {"matmul": "high"}),
    ("bf16", "autocast:AutocastPrecision", "float32 parameters, bfloat16 operations", {}),
    ("fp16", "autocast:ScaledPrecision", "float32 parameters, float16 operations, a scaled loss", {}),
    ("bf16_true", _PURE, "bfloat16 throughout, parameters included", {"dtype": torch.bfloat16}),
    ("fp16_true", _PURE, "float16 throughout, parameters included, without loss scaling", {"dtype": torch.float16}),
    ("fp64", _PURE, "float64 throughout", {"dtype": torch.float64}),
)
for _name, _home, _summary, _preset in _BUILT_IN:
    _named = {"name": _name} if _home == _PURE else {}
    precisions.register(_name, f"hftrain.precision.{_home}", summary=_summary, **_preset, **_named)
