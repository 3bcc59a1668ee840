"""What a run sets in the configurations of a model: its cache, and special tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

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
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    configs = [config for config in found.values() if getattr(config, "use_cache", None)]
    if not configs:
        return None
    before = [config.use_cache for config in configs]
    for config in configs:
        config.use_cache = False

    def undo() -> None:
        for config, value in zip(configs, before, strict=True):
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
        token, own = getattr(tokenizer, name, None), _tokens_of(config, name)
        known = generation is None or token in _tokens_of(generation, name)
        if token is None or (token in own and known):
            continue
        ends, is_list = name == "eos_token_id", isinstance(getattr(config, name, None), list)
        others = [each for each in own if each != token]
        setattr(config, name, [token, *others] if ends and is_list else token)
        if generation is not None:
            others = [each for each in _tokens_of(generation, name) if each not in (None, token)]
            setattr(generation, name, [token, *others] if ends else token)
        changed[name] = token
    return changed


def _tokens_of(config: Any, name: str) -> list[Any]:
    found = getattr(config, name, None)
    return found if isinstance(found, list) else [found]
