"""Set and restore torch's process-wide TF32 flags."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from hftrain.core.errors import ConfigError


def set_matmul(matmul: str) -> Callable[[], None]:
    """Set the arithmetic of float32 matrix products and cuDNN convolutions; return a function that restores it.

    Args:
        matmul: ``"high"`` for TF32, ``"highest"`` for float32.

    Raises:
        ConfigError: The flags were set through torch's newer `fp32_precision` interface, which hides them here.
    """
    # torch.compile still reads these flags and fails if only the newer `fp32_precision` was set
    # (pytorch issue 166387). Setting these keeps both interfaces readable. Switch once that issue is closed.
    try:
        with warnings.catch_warnings():
            # torch 2.9 recommends the newer flags once per process; 2.13 no longer does.
            warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
            before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError as error:
        raise ConfigError(
            f"Cannot use matmul={matmul!r}.",
            "This process has set torch's `fp32_precision` flags itself, and torch refuses to mix the two.",
            "Remove those settings, or let them control TF32 and set neither `matmul` nor 'tf32' here.",
            matmul=matmul,
        ) from error
    _apply(matmul, matmul == "high")
    return lambda: _apply(*before)


def _apply(matmul: str, allow_tf32: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = allow_tf32
