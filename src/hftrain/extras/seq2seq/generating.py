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


def load_generation_config(config_or_path: Any) -> Any:
    """Return a generation config from a Hub name, a folder or a file; return an object unchanged.

    Raises:
        ConfigError: It cannot be loaded, or it is not a generation config.
        MissingDependencyError: Loading needs transformers, which is not installed.
    """
    if not isinstance(config_or_path, (str, Path)):
        if not hasattr(config_or_path, "to_dict"):
            kind = type(config_or_path).__name__
            raise _config_error(config_or_path, f"A {kind} is not a generation config: it has no to_dict method.")
        return _validate(config_or_path)
    require("transformers", feature=f"generation_config={str(config_or_path)!r}", extra="transformers")
    from transformers import GenerationConfig

    path = Path(config_or_path).expanduser()
    try:
        if path.is_file():
            config = GenerationConfig.from_pretrained(path.parent, path.name)
        else:
            config = GenerationConfig.from_pretrained(path if path.is_dir() else str(config_or_path))
    except (OSError, ValueError) as error:
        raise _config_error(config_or_path, f"It cannot be loaded: {error}") from error
    return _validate(config)


def _validate(config: Any) -> Any:
    """Raise now if the model could not be saved with a generation config of transformers."""
    validate = getattr(config, "validate", None)
    if callable(validate) and accepts(validate, "strict"):
        try:
            validate(strict=True)
        except ValueError as error:
            raise _config_error(config, str(error), "Correct the settings that it names.") from error
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
            raise _config_error(
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


def _config_error(config: Any, reason: str, remedy: str | None = None) -> ConfigError:
    remedy = remedy or "Pass a GenerationConfig, a folder with generation_config.json, or the name of a model."
    return ConfigError("Cannot use this generation_config.", reason, remedy, generation_config=config)


# -- one batch -------------------------------------------------------------------------------------------------------


def run_generate(
    model: nn.Module, inputs: Any, *, trainer_model: Any, options: dict[str, Any], label_names: list[str]
) -> torch.Tensor:
    """Generate token ids from one batch.

    Args:
        model: The model without the strategy's wrapper.
        bare: The Trainer's model; it generates if `model` has no `generate`, as after tracing.
    """
    generate: Any = getattr(model, "generate", trainer_model.generate)
    output = generate(**_prompts(inputs, generate, label_names=label_names), **options)
    tokens: torch.Tensor = getattr(output, "sequences", output)
    return tokens


def drop_unset(options: Mapping[str, Any], model_config: Any) -> dict[str, Any]:
    """Return the options of `generate` that are not None; a `max_length` then counts more than the config's limit."""
    settings = {name: value for name, value in options.items() if value is not None}
    config = settings.get("generation_config", model_config)
    if "max_length" in settings and "max_new_tokens" not in settings and getattr(config, "max_new_tokens", None):
        settings["max_new_tokens"] = None
    return settings


def longest_output(options: Mapping[str, Any], model_config: Any) -> int | None:
    """Return the maximum length of generated sequences, from the options of `generate` or the model's own config."""
    config = options.get("generation_config", model_config)
    num_new, length = (options.get(n) if n in options else getattr(config, n, None) for n in _LIMITS)
    # Count the start token, which precedes the new ones.
    return length if num_new is None else num_new + 1


def _prompts(inputs: Mapping[str, Any], generate: Callable[..., Any], *, label_names: list[str]) -> dict[str, Any]:
    """Return the batch entries that `generate` accepts, without labels and decoder inputs derived from them."""
    labels, decoder = inputs.get("labels"), inputs.get("decoder_input_ids")
    excluded = {"labels", *label_names}
    if labels is not None and decoder is not None and labels.shape == decoder.shape:
        excluded |= {"decoder_input_ids", "decoder_attention_mask"}
    return {name: value for name, value in inputs.items() if name not in excluded and accepts(generate, name)}


# -- padding ---------------------------------------------------------------------------------------------------------


def padding_token(processor: Any, model: Any) -> int | None:
    """Return the padding token, or the end token if there is none; None if neither is defined."""
    sources = (processor, getattr(processor, "tokenizer", None), getattr(model, "generation_config", None))
    for name in ("pad_token_id", "eos_token_id"):
        for source in (*sources, getattr(model, "config", None)):
            token = getattr(source, name, None)
            # There may be several end tokens.
            token = token[0] if isinstance(token, (list, tuple)) else token
            if token is not None:
                return int(token)
    return None


def fill_with(token: int) -> Callable[[Any], Any]:
    """Return a function that replaces the -100 padding of concatenated token ids by a token, in place."""

    def fill(tree: Any) -> Any:
        is_tensor = isinstance(tree, torch.Tensor) and not tree.is_floating_point()
        if is_tensor or (isinstance(tree, numpy.ndarray) and tree.dtype.kind == "i"):
            tree[tree == IGNORED_LABEL] = token
        return tree

    return fill
