"""Properties read from a model: labels, inputs, whether it returns a loss, the devices of its layers, quantization."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.core.signatures import accepts
from hftrain.core.tree import CACHES
from hftrain.task.items import loss_shifts_labels

_NO_ACCELERATOR = ("cpu", "disk", "meta")


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside an adapter wrapper (one with PEFT's `get_base_model`), whose signature counts."""
    getter = getattr(model, "get_base_model", None)
    base = getter() if callable(getter) else model
    return base if isinstance(base, nn.Module) else model


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the model's `forward`."""
    return inspect.signature(base_model(model).forward).parameters


def is_transformers_like(model: nn.Module) -> bool:
    """Return whether a model follows the conventions of transformers (it has `config` and `save_pretrained`)."""
    return hasattr(model, "config") and hasattr(model, "save_pretrained")


def find_label_names(model: nn.Module) -> list[str]:
    """Return the names of `forward` arguments that hold labels.

    Source: the documented `label_names`: every argument with "label" in its name, and `start_positions`,
    `end_positions` for question answering.
    """
    names = list(forward_parameters(model))
    is_question_answering = "QuestionAnswering" in type(base_model(model)).__name__
    return [
        name
        for name in names
        if "label" in name or (is_question_answering and name in ("start_positions", "end_positions"))
    ]


def can_return_loss(model: nn.Module) -> bool:
    """Return whether the model returns a loss without labels, like CLIP (``return_loss=True`` by default)."""
    parameter = forward_parameters(model).get("return_loss")
    return parameter is not None and parameter.default is True


def accepts_item_count(model: nn.Module) -> bool:
    """Return whether the model is given `num_items_in_batch`, by the documented rule: it takes any keyword argument.

    A model declares it by the attribute `accepts_loss_kwargs`, or by naming the argument.
    """
    declaration = getattr(base_model(model), "accepts_loss_kwargs", None)
    return takes_item_count(base_model(model)) if declaration is None else bool(declaration)


def takes_item_count(function: Callable[..., Any]) -> bool:
    """Return whether a `compute_loss_func` accepts `num_items_in_batch`, by name or through ``**kwargs``."""
    callee = function.forward if isinstance(function, nn.Module) else function
    return accepts(callee, "num_items_in_batch")


def is_causal(model: nn.Module) -> bool:
    """Return whether a smoothed loss compares position t with label t + 1: for transformers' causal language models.

    Source: the documented `label_smoothing_factor`.
    """
    base = base_model(model)
    auto: Any = sys.modules.get("transformers.models.auto.modeling_auto")
    is_listed = auto is not None and type(base).__name__ in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return is_listed or loss_shifts_labels(base)


def is_recomputing(model: Any) -> bool:
    """Return whether a transformers model recomputes activations; version 5 warns about the property's older name."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False


def keys_to_ignore(model: nn.Module) -> list[str]:
    """Return the outputs that are not predictions: the config's `keys_to_ignore_at_inference`, else its cache."""
    config: Any = getattr(base_model(model), "config", None)
    if config is None:
        return []
    names = getattr(config, "keys_to_ignore_at_inference", None)
    return list(CACHES if names is None else with_all_cache_names(names))


def with_all_cache_names(names: Sequence[str]) -> Sequence[str]:
    """Add a cache's other names to one of them: scripts and configs name it as another transformers does."""
    return names if set(CACHES).isdisjoint(names) else [*names, *(name for name in CACHES if name not in names)]


def is_on_several_devices(model: nn.Module) -> bool:
    """Return whether the layers are on different accelerators, by a device map or by its own `parallelize`."""
    device_map = getattr(model, "hf_device_map", None)
    if device_map:
        return len({str(device) for device in device_map.values()} - set(_NO_ACCELERATOR)) > 1
    if getattr(model, "is_parallelizable", False) and getattr(model, "model_parallel", False):
        return True
    return len({parameter.device for parameter in model.parameters()}) > 1


def tensor_parallel_size(model: nn.Module, deepspeed_config: Any = None) -> int:
    """Return the number of processes each layer is split over, from the model or else the DeepSpeed config."""
    size = getattr(model, "tp_size", None) or getattr(model, "_tp_size", None)
    if size is None and deepspeed_config:
        size = (deepspeed_config.get("tensor_parallel") or {}).get("autotp_size")
    return int(size or 1)


_QUANTIZATION_FLAGS = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model, or the one inside its adapters, is marked as quantized."""
    base: Any = base_model(model)
    is_marked = any(getattr(base, flag, False) is True for flag in _QUANTIZATION_FLAGS)
    return is_marked or getattr(base, "hf_quantizer", None) is not None


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
