"""How a model is made ready: in another dtype, on copies of its weights, without a cache, with special tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from hftrain.core.tree import map_tensors


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype | None, *, keep_on: torch.device | None = None) -> Iterator[None]:
    """Run a model on copies of its floating-point weights in another dtype, then restore the original weights.

    Copies replace parameters and buffers in the modules. The original tensors keep their dtype: changing it would
    silently break hooks on their gradients, such as DDP's all-reduce.

    Args:
        dtype: The dtype of the copies; None changes nothing.
        keep_on: The device that holds the original weights meanwhile; None does not move them.
    """
    originals: list[tuple[nn.Module, str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    devices: list[tuple[torch.Tensor, torch.device]] = []
    for module in model.modules() if dtype is not None else ():
        # With every name: a module may hold one tensor under several.
        options: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
        for name, tensor in chain(module.named_parameters(**options), module.named_buffers(**options)):
            if tensor.is_floating_point() and tensor.dtype is not dtype:
                originals.append((module, name, tensor))
    try:
        for module, name, tensor in originals:
            # Several modules may share one tensor.
            if id(tensor) not in copies:
                copy = tensor.detach().to(dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                if keep_on is not None and tensor.device != keep_on:
                    devices.append((tensor, tensor.device))
                    tensor.data = tensor.data.to(keep_on)
            setattr(module, name, copies[id(tensor)])
        copies.clear()
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)
        for module, name, tensor in originals:
            setattr(module, name, tensor)


def cast_inputs(inputs: Any, dtype: torch.dtype, *, labels: list[str]) -> Any:
    """Return a batch with its floating-point tensors in `dtype`; labels keep their dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(inputs, Mapping):
        return {key: value if key in labels else map_tensors(value, cast) for key, value in inputs.items()}
    return map_tensors(inputs, cast)


def full_eval_dtype(args: Any) -> torch.dtype | None:
    """Return the dtype to evaluate entirely in, None for the model's own."""
    if args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if args.fp16_full_eval else None


Undo = Callable[[], None]


def generates(args: Any) -> bool:
    """Return whether evaluations call `generate`; plain `TrainingArguments` do not have the setting."""
    return bool(getattr(args, "predict_with_generate", False))


def keeps_cache(args: Any) -> bool:
    """Return whether a model's `config.use_cache` stays as it is: asked for, or an evaluation reads what it returns."""
    return bool(args.use_cache or generates(args) or args.past_index >= 0)


def switch_cache_off(model: nn.Module) -> Undo | None:
    """Set `use_cache` to False in a transformers model's configurations; return what restores it, None if it was off.

    Mutates the configurations; a composite model has several. The cache of keys and values serves generation only:
    recomputing a forward pass would add to it a second time, and with it, documents packed in one row are not separate.
    """
    unique_configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    configs = [config for config in unique_configs.values() if getattr(config, "use_cache", None)]
    if not configs:
        return None
    former_values = [config.use_cache for config in configs]
    for config in configs:
        config.use_cache = False

    def undo() -> None:
        for config, value in zip(configs, former_values, strict=True):
            config.use_cache = value

    return undo


def align_special_tokens(model: nn.Module, tool: Any) -> dict[str, int]:
    """Copy the tokenizer's end, begin and padding tokens to the model's configs; return the tokens that changed.

    Tokens that the tokenizer does not define and additional end tokens are kept.
    """
    tokenizer = tool if hasattr(tool, "pad_token_id") else getattr(tool, "tokenizer", None)
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    if tokenizer is None or not callable(getattr(config, "get_text_config", None)):
        return {}
    config = config.get_text_config()  # type: ignore[union-attr]
    changed: dict[str, int] = {}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token, config_tokens = getattr(tokenizer, name, None), _tokens_of(config, name)
        is_aligned = generation is None or token in _tokens_of(generation, name)
        if token is None or (token in config_tokens and is_aligned):
            continue
        is_end_token, is_list = name == "eos_token_id", isinstance(getattr(config, name, None), list)
        other_tokens = [other for other in config_tokens if other != token]
        setattr(config, name, [token, *other_tokens] if is_end_token and is_list else token)
        if generation is not None:
            other_tokens = [other for other in _tokens_of(generation, name) if other not in (None, token)]
            setattr(generation, name, [token, *other_tokens] if is_end_token else token)
        changed[name] = token
    return changed


def _tokens_of(config: Any, name: str) -> list[Any]:
    tokens = getattr(config, name, None)
    return tokens if isinstance(tokens, list) else [tokens]
