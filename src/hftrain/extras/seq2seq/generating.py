"""Evaluation and prediction with a model's `generate`: its inputs, settings and output tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.extras import require
from hftrain.core.log import warn_once
from hftrain.core.signatures import accepts
from hftrain.evaluation.preparation import generates
from hftrain.strategies.base import Strategy
from hftrain.task.items import IGNORED_LABEL
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

_SETTINGS = {"generation_max_length": "max_length", "generation_num_beams": "num_beams"}
_LIMITS = ("max_new_tokens", "max_length")


# -- before anything runs --------------------------------------------------------------------------------------------


def load_generation_config(given: Any) -> Any:
    """Return a generation config from a Hub name, a folder or a file; return an object unchanged.

    Raises:
        ConfigError: It cannot be loaded, or it is not a generation config.
        MissingDependencyError: Loading needs transformers, which is not installed.
    """
    if not isinstance(given, (str, Path)):
        if not hasattr(given, "to_dict"):
            raise _no_config(given, f"A {type(given).__name__} is not a generation config: it has no to_dict method.")
        return _validated(given)
    require("transformers", feature=f"generation_config={str(given)!r}", extra="transformers")
    from transformers import GenerationConfig

    path = Path(given).expanduser()
    try:
        if path.is_file():
            config = GenerationConfig.from_pretrained(path.parent, path.name)
        else:
            config = GenerationConfig.from_pretrained(path if path.is_dir() else str(given))
    except (OSError, ValueError) as error:
        raise _no_config(given, f"It cannot be loaded: {error}") from error
    return _validated(config)


def _validated(config: Any) -> Any:
    """Raise now if the model could not be saved with a generation config of transformers."""
    validate = getattr(config, "validate", None)
    if callable(validate) and accepts(validate, "strict"):
        try:
            validate(strict=True)
        except ValueError as error:
            raise _no_config(config, str(error), "Correct the settings that it names.") from error
    return config


def prepare_generation(args: Any, strategy: Strategy, task: TaskModule, model: Any, *, config: Any) -> None:
    """Set a model's generation config (None keeps its own) and check that it can generate; launches nothing.

    Raises:
        ConfigError: The model's `generate` does not accept a setting, or a task or `past_index` conflicts with it.
        TaskError: The model has no `generate`.
    """
    if config is not None:
        if not hasattr(model, "generation_config"):
            name = type(model).__name__
            raise _no_config(
                config,
                f"{name} has no attribute generation_config, which its generate would read.",
                "Add it, or use generation_max_length, generation_num_beams and the arguments of evaluate().",
            )
        model.generation_config = config
    if not generates(args):
        for name in _SETTINGS:
            if getattr(args, name, None) is not None:
                warn_once(f"{name} has no effect without predict_with_generate=True.")
        return
    _check_evaluates_plainly(args, task)
    if not callable(getattr(model, "generate", None)):
        raise TaskError(
            "Cannot use predict_with_generate=True.",
            f"{type(model).__name__} has no method generate.",
            "Add generate(input_ids, ...), which returns token ids, or leave predict_with_generate out.",
        )
    check_taken(model, [option for name, option in _SETTINGS.items() if getattr(args, name) is not None])
    if strategy.shards_model:
        check_taken(model, ["synced_gpus"])


def check_taken(model: Any, options: Iterable[str]) -> None:
    """Raise `ConfigError` if a model's `generate` does not accept one of these options."""
    unknown = [name for name in options if not accepts(model.generate, name)]
    if unknown:
        raise ConfigError(
            f"Cannot generate with {', '.join(unknown)}.",
            f"{type(model).__name__}.generate takes no such argument.",
            "Add it there, or leave the setting out.",
        )


def _check_evaluates_plainly(args: Any, task: TaskModule) -> None:
    if not isinstance(task, ModelTask):
        raise ConfigError(
            f"Cannot use predict_with_generate=True with {type(task).__name__}.",
            "A task evaluates and predicts in its own way.",
            "Call self.model.generate in its evaluation_step and prediction_step, or pass a plain model.",
        )
    if args.past_index >= 0:
        raise ConfigError(
            f"Cannot use past_index={args.past_index} with predict_with_generate=True.",
            "generate passes a model's memory from token to token itself.",
            "Leave one of the two out.",
        )


def _no_config(given: Any, reason: str, remedy: str | None = None) -> ConfigError:
    remedy = remedy or "Pass a GenerationConfig, a folder with generation_config.json, or the name of a model."
    return ConfigError("Cannot use this generation_config.", reason, remedy, generation_config=given)


# -- one batch -------------------------------------------------------------------------------------------------------


def run_generate(
    model: nn.Module, inputs: Any, *, bare: Any, options: dict[str, Any], label_names: list[str]
) -> torch.Tensor:
    """Generate token ids from one batch.

    Args:
        model: The model without the strategy's wrapper.
        bare: The Trainer's model; it generates if `model` has no `generate`, as after tracing.
    """
    generate: Any = getattr(model, "generate", bare.generate)
    found = generate(**_prompts(inputs, generate, label_names=label_names), **options)
    tokens: torch.Tensor = getattr(found, "sequences", found)
    return tokens


def limited(options: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """Return the options of `generate` that are not None; a `max_length` then counts more than the config's limit."""
    chosen = {name: value for name, value in options.items() if value is not None}
    config = chosen.get("generation_config", own)
    if "max_length" in chosen and "max_new_tokens" not in chosen and getattr(config, "max_new_tokens", None):
        chosen["max_new_tokens"] = None
    return chosen


def longest_output(options: Mapping[str, Any], own: Any) -> int | None:
    """Return the maximum length of generated sequences, from the options of `generate` or the model's own config."""
    config = options.get("generation_config", own)
    num_new, length = (options.get(n) if n in options else getattr(config, n, None) for n in _LIMITS)
    # Count the start token, which precedes the new ones.
    return length if num_new is None else num_new + 1


def _prompts(inputs: Mapping[str, Any], generate: Callable[..., Any], *, label_names: list[str]) -> dict[str, Any]:
    """Return the batch entries that `generate` accepts, without labels and decoder inputs derived from them."""
    labels, decoder = inputs.get("labels"), inputs.get("decoder_input_ids")
    left_out = {"labels", *label_names}
    if labels is not None and decoder is not None and labels.shape == decoder.shape:
        left_out |= {"decoder_input_ids", "decoder_attention_mask"}
    return {name: value for name, value in inputs.items() if name not in left_out and accepts(generate, name)}


# -- padding ---------------------------------------------------------------------------------------------------------


def padding_token(tool: Any, model: Any) -> int | None:
    """Return the padding token, or the end token if there is none; None if neither is defined."""
    sources = (tool, getattr(tool, "tokenizer", None), getattr(model, "generation_config", None))
    for name in ("pad_token_id", "eos_token_id"):
        for source in (*sources, getattr(model, "config", None)):
            found = getattr(source, name, None)
            # There may be several end tokens.
            found = found[0] if isinstance(found, (list, tuple)) else found
            if found is not None:
                return int(found)
    return None


def fill_with(token: int) -> Callable[[Any], Any]:
    """Return a function that replaces the -100 padding of concatenated token ids by a token, in place."""

    def fill(tree: Any) -> Any:
        is_tensor = isinstance(tree, torch.Tensor) and not tree.is_floating_point()
        if is_tensor or (isinstance(tree, numpy.ndarray) and tree.dtype.kind == "i"):
            tree[tree == IGNORED_LABEL] = token
        return tree

    return fill
