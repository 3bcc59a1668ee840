"""Properties read from a model: label names, inputs, whether it returns a loss, and the devices of its layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hftrain.task.loss import IGNORED_LABEL

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
    """Return whether the model normalises its own loss when it is given `num_items_in_batch`.

    A model declares it by the attribute `accepts_loss_kwargs` or by naming the argument. ``**kwargs`` counts only for
    transformers-like models: any other model would ignore the number and return a plain mean.
    """
    base = base_model(model)
    declared = getattr(base, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = forward_parameters(model)
    if "num_items_in_batch" in parameters:
        return True
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any and is_transformers_like(base)


def takes_item_count(function: Callable[..., Any]) -> bool:
    """Return whether a `compute_loss_func` accepts `num_items_in_batch`, by name or through ``**kwargs``."""
    called = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(called).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or "num_items_in_batch" in parameters


def is_causal(model: nn.Module) -> bool:
    """Return whether the model compares position t with label t + 1 (by its class name, as the documentation does).

    Models "for conditional generation" do unless they are encoder-decoders, whose decoder inputs are shifted instead.
    """
    base = base_model(model)
    name = type(base).__name__
    if name.endswith("ForConditionalGeneration"):
        config = getattr(base, "config", None)
        return config is not None and not getattr(config, "is_encoder_decoder", False)
    return name.endswith(("ForCausalLM", "LMHeadModel"))


def own_reduction(model: nn.Module) -> str | None:
    """Return the loss reduction in a CTC model's config, ``"mean"`` (over samples) or ``"sum"``; else None."""
    base = base_model(model)
    if not type(base).__name__.endswith("ForCTC"):
        return None
    return getattr(getattr(base, "config", None), "ctc_loss_reduction", None)


def ignored_labels(model: nn.Module) -> tuple[int, ...]:
    """Return the labels that a model's loss ignores: -100, and the `semantic_loss_ignore_index` of a segmenter."""
    other = getattr(getattr(base_model(model), "config", None), "semantic_loss_ignore_index", None)
    return (IGNORED_LABEL, other) if isinstance(other, int) and other != IGNORED_LABEL else (IGNORED_LABEL,)


def is_recomputing(model: Any) -> bool:
    """Return whether a transformers model recomputes activations; version 5 warns about the property's older name."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False


def keys_to_ignore(model: nn.Module) -> list[str]:
    """Return the outputs that are not predictions: the config's `keys_to_ignore_at_inference`."""
    config: Any = getattr(base_model(model), "config", None)
    return list(getattr(config, "keys_to_ignore_at_inference", None) or [])


def is_spread(model: nn.Module) -> bool:
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
