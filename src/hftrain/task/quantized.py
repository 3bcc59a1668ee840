"""Checks of models that are already quantized."""

from __future__ import annotations

from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.task.introspect import base_model

_FLAGS = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model, or the one inside its adapters, is marked as quantized."""
    base: Any = base_model(model)
    return any(getattr(base, flag, False) is True for flag in _FLAGS) or getattr(base, "hf_quantizer", None) is not None


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has PEFT adapters, as a wrapper around it or loaded into it."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def check_quantized(model: nn.Module, *, compiles: bool) -> None:
    """Raise if a quantized model cannot be trained."""
    if not is_quantized(model):
        return
    name, quantizer = type(base_model(model)).__name__, getattr(base_model(model), "hf_quantizer", None)
    trains_weights = bool(getattr(quantizer, "is_qat_trainable", False))
    if compiles:
        reason, remedy = "A quantized model cannot be compiled for training.", "Leave torch_compile out."
    elif not has_adapters(model) and not trains_weights:
        reason = "Its weights are quantized, and weights of a few bits cannot be updated by gradients."
        remedy = "Add trainable adapters: peft.get_peft_model(model, peft.LoraConfig(...))."
    elif quantizer is not None and not (trains_weights or getattr(quantizer, "is_trainable", True)):
        reason, remedy = "Its quantization method passes no gradients on.", "Quantize it with bitsandbytes or GPTQ."
    else:
        return
    raise ConfigError(f"Cannot train {name}, a quantized model.", reason, remedy)
