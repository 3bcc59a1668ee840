"""Float32 throughout, with or without TF32 inside matrix products."""

from __future__ import annotations

import torch

from hftrain.core.types import PrecisionPolicy
from hftrain.precision.base import Precision


class FullPrecision(Precision):
    """Run every operation in the parameters' own dtype.

    Args:
        matmul: ``"highest"`` or ``"high"`` (TF32); None keeps torch's setting.

    Source: the documented `tf32` (True is ``"high"``, False is ``"highest"``).

    Example:
        >>> FullPrecision(matmul="high").policy.name
        'tf32'
    """

    def __init__(self, *, matmul: str | None = None) -> None:
        super().__init__(
            PrecisionPolicy(
                name="tf32" if matmul == "high" else "fp32",
                param_dtype=torch.float32,
                compute_dtype=torch.float32,
                reduce_dtype=torch.float32,
                matmul=matmul,
            )
        )
