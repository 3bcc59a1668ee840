"""PEFT adapters in a folder: only the adapter weights, in PEFT's own format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.fitting import misfit
from hftrain.core.errors import CheckpointError
from hftrain.core.seed import preserved_rng
from hftrain.storage.shards import load_tensors
from hftrain.storage.tensors import load_containers, tensor_identity

_WEIGHTS, _BIN_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"


def saves_adapters(model: torch.nn.Module) -> bool:
    """Tell whether a model saves only its adapters: a `PeftModel`, or a transformers model with `add_adapter`.

    A `PeftMixedModel` cannot save itself; its weights are saved whole.
    """
    return bool(_saved_adapters(model))


def _saved_adapters(model: Any) -> list[str]:
    if any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in type(model).__mro__):
        return list(model.peft_config)
    try:
        # A transformers model with `add_adapter` saves its active adapter, in the folder itself.
        return list(model.active_adapters()) if _has_loaded_adapters(model) else []
    except ValueError:
        return []  # PEFT's inject_adapter_in_model added them, of which transformers knows nothing: saved whole


def _has_loaded_adapters(model: Any) -> bool:
    return hasattr(type(model), "get_adapter_state_dict") and hasattr(model, "peft_config")


def missing_from_adapters(model: Any) -> dict[str, torch.Tensor]:
    """Return, by name, the trainable parameters and the running statistics that the adapters' files do not hold.

    Others than the adapters may train too, if `requires_grad_` was called. The files of learned prompts hold what an
    encoder of prompts computes, and not its parameters.
    """
    from peft import get_peft_model_state_dict

    with preserved_rng():  # a prompt's encoder may have dropout
        # PEFT would ask the Hub whether the embeddings have been resized.
        options: dict[str, Any] = {"save_embedding_layers": False}
        states = [get_peft_model_state_dict(model, adapter_name=name, **options) for name in _saved_adapters(model)]
    identities = {tensor_identity(value) for state in states for value in state.values()}
    prompts = [state["prompt_embeddings"] for state in states if "prompt_embeddings" in state]
    tensors = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            tensors.update({f"{name}.{key}": value for key, value in module.named_buffers(recurse=False)})
    return {
        name: value
        for name, value in tensors.items()
        if tensor_identity(value) not in identities
        if not any(value.shape == prompt.shape and torch.equal(value.cpu(), prompt) for prompt in prompts)
    }


def save_adapters(model: Any, folder: Path, state: Mapping[str, Any], *, safe: bool) -> None:
    """Write every adapter with its configuration, from a whole model's state; replaces older adapter weights."""
    for name in _saved_adapters(model):
        for file in (_WEIGHTS, _BIN_WEIGHTS):
            (_folder_of(model, folder, name) / file).unlink(missing_ok=True)
    model.save_pretrained(folder, state_dict=dict(state), safe_serialization=safe)


def load_adapters(model: Any, folder: Path) -> None:
    """Overwrite every adapter of a model, and other trained modules saved with it, in place.

    Raises:
        CheckpointError: An adapter's weights are missing, damaged, or do not fit.
    """
    from peft import set_peft_model_state_dict

    for name in _saved_adapters(model):
        source = _folder_of(model, folder, name)
        path = source / (_WEIGHTS if (source / _WEIGHTS).is_file() else _BIN_WEIGHTS)
        state = load_tensors(path) if path.name == _WEIGHTS else load_containers(path)
        try:
            result: Any = set_peft_model_state_dict(model, state, adapter_name=name)
        except (KeyError, RuntimeError) as error:
            raise _misfit(path, name, str(error)) from error
        if result.unexpected_keys and not model.peft_config[name].is_prompt_learning:  # whose names are not the model's
            raise _misfit(path, name, f"unexpected: {', '.join(result.unexpected_keys)}")


def _folder_of(model: Any, folder: Path, name: str) -> Path:
    return folder if name == "default" or _has_loaded_adapters(model) else folder / name


def _misfit(path: Path, name: str, problem: str) -> CheckpointError:
    remedy = "Build the model with the adapter configuration of the checkpoint."
    return misfit(path, f"The adapter {name!r} does not fit: {problem}", remedy)
