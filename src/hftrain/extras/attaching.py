"""Weights that a strategy reads from files when it shards a model that was built on the meta device."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import torch
from torch import nn

from hftrain.checkpoint.weights import add_tied, open_weights
from hftrain.core.errors import CheckpointError, ConfigError, listed
from hftrain.core.parameters import attach_stored, weightless
from hftrain.core.seed import preserved_rng
from hftrain.core.types import StoredTensor

# Old files hold what the models compute.
_COMPUTED = r"rotary_emb\.inv_freq$"


def attach_weights(model: nn.Module, source: str | Path) -> nn.Module:
    """Say which files hold the weights of a model on the meta device; call it in every process.

    The strategy reads them when it shards the model: each process its own blocks, one tensor at a time, in the dtype of
    the model's parameters. Reads no tensor now. Buffers that are in no file get the values that a transformers model
    computes when it is built. Parameters that are not on the meta device may be missing in the files.

    Args:
        model: The network, not the task; changed in place.
        source: A folder with safetensors, as `save_pretrained`, `Trainer.save_model` or a checkpoint writes it, or one
            safetensors file.

    Returns:
        The model.

    Raises:
        ConfigError: The model is not on the meta device, or has tensors there that no file holds.
        CheckpointError: There are no safetensors, a file is damaged, or names or shapes do not fit.
    """
    path, problem = Path(source), f"Cannot read the weights of {type(model).__name__} from {source}."
    if not any(parameter.is_meta for parameter in model.parameters()):
        remedy = "Build it within torch.device('meta'), or load it with from_pretrained() or load_state_dict()."
        raise ConfigError(problem, "It is not on the meta device, and has weights.", remedy)
    state, expected = open_weights(path), model.state_dict(keep_vars=True)
    add_tied(state, expected)
    ignored = "|".join([_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())])
    state = {name: value for name, value in state.items() if name in expected or not re.search(ignored, name)}
    if not all(isinstance(value, StoredTensor) for value in state.values()):
        raise CheckpointError(problem, "Its files are in torch's zip format, which is read whole.", "Use safetensors.")
    kinds = {
        "missing": [name for name, tensor in expected.items() if name not in state and tensor.is_meta],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": [name for name in state if name in expected and state[name].shape != expected[name].shape],
    }
    if mismatches := [f"{kind}: {listed(names, most=5)}" for kind, names in kinds.items() if names]:
        raise CheckpointError(
            problem,
            f"Names or shapes do not fit: {'; '.join(mismatches)}.",
            "Use the files of this model. If transformers renames them when it loads: load and save them once with "
            "save_pretrained(folder, save_original_format=False).",
        )
    _fill_computed_buffers(model)
    paths = ((path, leaf) for path, module in model.named_modules() for leaf in _meta_tensors(module))
    names = [f"{path}.{leaf}".lstrip(".") for path, leaf in paths]
    if computed := [name for name in names if name not in state]:
        raise ConfigError(
            problem,
            f"The model computes {listed(computed, most=5)} when it is built, which did not happen on the meta device.",
            "Build it within accelerate's init_empty_weights(), which puts only parameters on the meta device.",
        )
    attach_stored(model, state)
    return model


def _meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's buffers, and tensors in plain attributes, that are on the meta device."""
    tensors = {**vars(module), **dict(module.named_buffers(recurse=False))}
    return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor) and value.is_meta}


def _fill_computed_buffers(model: nn.Module) -> None:
    """Fill the buffers that no file holds, because a transformers model computes them when it is built; mutates it.

    They are taken from a twin that is built without weights, in the dtype and on the device where the model would have
    been built.
    """
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    for submodel in model.modules():
        if not isinstance(submodel, kind) or not any(map(_meta_tensors, submodel.modules())):
            continue
        default: torch.dtype = torch.get_default_dtype()
        torch.set_default_dtype(submodel.dtype)
        try:
            with preserved_rng(), weightless(), torch.device("cpu"):
                twin_modules = dict(type(submodel)(copy.deepcopy(submodel.config)).named_modules())
        finally:
            torch.set_default_dtype(default)
        for name, module in submodel.named_modules():
            for leaf, buffer in _meta_tensors(module).items():
                value = getattr(twin_modules.get(name), leaf, None)
                if isinstance(value, torch.Tensor) and value.shape == buffer.shape:
                    setattr(module, leaf, value.to(buffer.dtype))
