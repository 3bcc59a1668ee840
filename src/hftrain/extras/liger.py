"""Liger kernels: faster layers for transformers models, replaced in place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError, check_known
from hftrain.core.extras import require
from hftrain.core.log import warn_once
from hftrain.task.introspect import base_model, is_transformers_like


def apply_liger_kernels(model: nn.Module, options: Mapping[str, bool] | None) -> None:
    """Replace layers of a transformers model by Liger kernels; warn about any other model and leave it unchanged.

    Args:
        model: Mutated; if it has adapters, the model inside them is.
        options: Which kernels to apply, by Liger's names; None for Liger's defaults.

    Source: the documented `use_liger_kernel` and `liger_kernel_config`.
    """
    require("liger-kernel", feature="use_liger_kernel=True")
    base: Any = base_model(model)
    if not is_transformers_like(base):
        warn_once(f"use_liger_kernel=True does nothing to a {type(base).__name__}: it is not a transformers model.")
        return
    require("triton", feature="use_liger_kernel=True")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KERNELS

    kind = getattr(base.config, "model_type", None)
    if kind not in KERNELS:
        raise ConfigError(
            f"Cannot use use_liger_kernel=True with {type(base).__name__}.",
            f"Liger has no kernels for model_type={kind!r}.",
            f"Leave it out. Liger knows: {', '.join(sorted(KERNELS))}.",
        )
    kernels = [name for name in inspect.signature(KERNELS[kind]).parameters if name != "model"]
    for name in options or {}:
        problem = f"Cannot use liger_kernel_config={{{name!r}: ...}}."
        check_known(name, kernels, problem, f"Liger has no such kernel for model_type={kind!r}.")
    KERNELS[kind](model=base, **dict(options or {}))
