"""Trace a model before evaluation (`jit_mode_eval`)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hftrain.core.log import get_logger

logger = get_logger(__name__)

# The errors that torch.jit.trace raises for models that cannot be traced.
_TRACE_ERRORS = (RuntimeError, TypeError, ValueError, NameError, IndexError, AttributeError)


def trace_model(
    model: nn.Module,
    dataloader: Any,
    *,
    prepare: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
) -> nn.Module:
    """Return the model traced with a loader's first batch; if tracing fails, warn and return it unchanged."""
    try:
        batch = prepare(next(iter(dataloader)))
        with warnings.catch_warnings(), torch.no_grad(), context():
            # torch deprecates torch.jit, which the user requested by name, and warns that Python values become
            # constants, which tracing implies. In torch 2.15 that is a FutureWarning.
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
            if isinstance(batch, Mapping):
                traced = torch.jit.trace(model, example_kwarg_inputs=dict(batch), strict=False)  # type: ignore[no-untyped-call]
            else:
                example = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
                traced = torch.jit.trace(model, example, strict=False)  # type: ignore[no-untyped-call]
            frozen: nn.Module = torch.jit.freeze(traced)
            return frozen
    except (StopIteration, *_TRACE_ERRORS) as error:
        logger.warning("jit_mode_eval: the model could not be traced and runs untraced: %r", error)
        return model


class JitModel:
    """Trace a model with its first batch and record how many seconds that took."""

    def __init__(self, trace: Callable[[nn.Module, Any], nn.Module], model: nn.Module) -> None:
        self.compilation_s: float | None = None
        self._trace = trace
        self._model = model

    def for_batch(self, batch: Any) -> nn.Module:
        """Return the traced model; trace it first if this is the first batch."""
        if self.compilation_s is None:
            start_s = time.perf_counter()
            self._model = self._trace(self._model, [batch])
            self.compilation_s = round(time.perf_counter() - start_s, 4)
        return self._model
