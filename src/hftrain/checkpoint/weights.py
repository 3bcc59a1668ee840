"""A model's weights in a folder: whole, sharded or those of PEFT adapters; safetensors, or torch's zip format."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.fitting import misfit, restoring
from hftrain.checkpoint.manifest import (
    BIN_WEIGHTS,
    BIN_WEIGHTS_INDEX,
    TASK_STATE,
    WEIGHT_SHARDS,
    WEIGHTS,
    WEIGHTS_INDEX,
)
from hftrain.core.errors import CheckpointError
from hftrain.core.extras import is_available
from hftrain.core.log import get_logger
from hftrain.core.seed import preserved_rng
from hftrain.core.signatures import call_with
from hftrain.storage.files import read_json, unreadable
from hftrain.storage.shards import find_shards, load_tensors, open_shards, open_tensors, read_whole
from hftrain.storage.tensors import (
    check_tensors,
    load_containers,
    plain_containers,
    save_containers,
    save_tensors,
    tensor_identity,
)
from hftrain.strategies.base import Strategy

# Configurations that a model writes next to its weights, and that may change during training.
_CONFIGS = ("config", "generation_config")
_SHARD = re.compile(r"(model|pytorch_model)[\w.-]*\.(safetensors|bin)")

logger = get_logger(__name__)


def save_weights(
    model: torch.nn.Module, folder: Path, *, state_dict: Mapping[str, Any] | None = None, safe: bool = True
) -> None:
    """Write a model's weights, replacing those in a folder, and its configuration if it has `save_pretrained`.

    Args:
        model: The model without wrappers.
        state_dict: The weights to write instead of the model's own; an empty one writes only the configuration.
        safe: Write safetensors instead of torch's zip format.

    Raises:
        CheckpointError: The format cannot store the state.
    """
    state = dict(model.state_dict() if state_dict is None else state_dict)
    _remove_weights(folder)
    if not state and next(model.parameters(), None) is not None:
        if _saves_itself(model):
            model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    elif saves_adapters(model):
        save_adapters(model, folder, state, safe=safe)
    elif _saves_itself(model):
        _save_pretrained(model, folder, state, safe=safe)
    elif not safe:
        save_containers(state, folder / BIN_WEIGHTS)
    else:
        check_saveable(model, state)
        save_tensors(state, folder / WEIGHTS)


def check_saveable(model: torch.nn.Module, state: Mapping[str, Any], *, safe: bool = True) -> None:
    """Raise `CheckpointError` if a model's state cannot be saved as safetensors (or, without `safe`, as a zip)."""
    if saves_adapters(model):
        return
    if _saves_itself(model):
        _try_to_save(model, state, safe=safe)
        return
    if not safe:
        plain_containers(dict(state), type(model).__name__)
        return
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"Cannot save the weights of {type(model).__name__} as safetensors.",
            f"{', '.join(others)} are not tensors.",
            "Set save_safetensors=False, or return tensors from get_extra_state().",
        )
    check_tensors(state)


def load_weights(
    model: torch.nn.Module, folder: Path, *, strict: bool = True, strategy: Strategy | None = None
) -> None:
    """Overwrite a model's weights in place with those of a folder, in any supported format.

    Args:
        folder: What `save_weights` or `save_pretrained` wrote.
        strict: Raise, instead of warning, if names are missing or unexpected.
        strategy: Loads the weights, if the model's parameters are split among processes.

    Raises:
        CheckpointError: There are no weights, a file is damaged, or names or shapes do not fit.
    """
    # Each process of a split model has written its part of all weights, not only of the adapters.
    if saves_adapters(model) and not find_shards(folder, stem=WEIGHT_SHARDS):
        return load_adapters(model, folder)
    model_state = None if strategy is None else strategy.own_state(model)
    state = matching_weights(model, folder, strict=strict, own=model_state)
    if strategy is None or not strategy.loads_parts:
        state = read_whole(state)
    try:
        with restoring(folder):  # the model itself checks its state other than tensors
            if strategy is None:
                model.load_state_dict(state, strict=strict)
            else:
                strategy.load_model_state(model, state, strict=strict)
    except CheckpointError as error:
        raise _misfit(model, folder, str(error.__cause__ or error)) from error


def matching_weights(
    model: torch.nn.Module, folder: Path, *, strict: bool = True, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Find a folder's weights under the names of a model's state, `StoredTensor` values included; see `load_weights`.

    `own` replaces the model's state if that has other names. It holds the parameters themselves, so that names of the
    same parameter can be recognised.
    """
    state, own = open_weights(folder), model.state_dict(keep_vars=True) if own is None else own
    add_tied(state, own)
    if state.keys() != own.keys() and _saves_itself(model) and is_available("transformers>=5"):
        state = _renamed(model, folder, read_whole(state))
        add_tied(state, own)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    missing = [name for name in own if name not in state and not any(re.search(key, name) for key in ignored)]
    extra = [name for name in state if name not in own]
    problem = "; ".join(
        f"{kind}: {', '.join(names)}" for kind, names in (("missing", missing), ("unexpected", extra)) if names
    )
    if problem and strict:
        raise _misfit(model, folder, problem)
    if problem:
        logger.warning("The weights in %s were loaded in part; %s.", folder, problem)
    # what the model leaves out when it saves is created with it, and is kept
    return {name: value for name, value in {**own, **state}.items() if strict or name in state}


def read_weights(folder: Path) -> dict[str, Any]:
    """Read all weights of a folder onto the CPU, under their stored names.

    Raises:
        CheckpointError: There are none, or a file is damaged.
    """
    return read_whole(open_weights(folder))


def open_weights(folder: Path) -> dict[str, Any]:
    """Find the weights in a folder, or in a file, under their stored names; see `matching_weights`."""
    if folder.is_file():
        return _open_file(folder)
    if find_shards(folder, stem=WEIGHT_SHARDS):
        return dict(open_shards(folder, stem=WEIGHT_SHARDS))
    for name, index in ((WEIGHTS, WEIGHTS_INDEX), (BIN_WEIGHTS, BIN_WEIGHTS_INDEX)):
        if (folder / name).is_file():
            return _open_file(folder / name)
        if (folder / index).is_file():
            return _open_files(folder, folder / index)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    raise CheckpointError(
        f"Cannot load weights from {folder}.",
        f"It has neither {WEIGHTS} nor {BIN_WEIGHTS}, whole or sharded.",
        "Use a folder that holds a model's weights.",
        found=names[:12],
    )


def save_task_state(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a task's state outside its model, such as a loss's parameters; writes no file if there is none."""
    if tensors:
        save_tensors(tensors, folder / TASK_STATE)


def load_task_state(folder: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read what `save_task_state` wrote; raises `CheckpointError` if it is damaged, or has other names."""
    path = folder / TASK_STATE
    tensors = load_tensors(path) if names or path.exists() else {}
    if tensors.keys() != set(names):
        raise CheckpointError(
            f"Cannot load the task's own state from {path}.",
            f"It holds {sorted(tensors)}, and the task has {sorted(names)}.",
            "Resume with the task that was trained.",
        )
    return tensors


def _saves_itself(model: torch.nn.Module) -> bool:
    save = getattr(model, "save_pretrained", None)
    return save is not None and "state_dict" in inspect.signature(save).parameters


def with_own_configs(model: Any) -> Any:
    """Return a shallow copy of a model with copies of its configurations."""
    # Not copy.copy: the classes that FSDP creates cannot be copied.
    face = object.__new__(type(model))
    vars(face).update(vars(model))
    vars(face).update({name: copy.deepcopy(vars(model)[name]) for name in _CONFIGS if name in vars(model)})
    return face


def _try_to_save(model: Any, state: Mapping[str, Any], *, safe: bool) -> None:
    """Save a model with one number in place of each weight, the same for shared ones, into a temporary folder."""
    if not model.save_pretrained.__module__.startswith("transformers.") or getattr(model, "hf_quantizer", None):
        return  # the user's code, or weights in a form that only a save gives them
    small: dict[Any, torch.Tensor] = defaultdict(lambda: torch.zeros(1))
    weights = {name: small[tensor_identity(value) or name] for name, value in state.items()}
    options = {"state_dict": weights, "safe_serialization": safe, "save_original_format": False}
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the save itself warns
            call_with(with_own_configs(model).save_pretrained, {"save_directory": folder, **options})
    except (RuntimeError, TypeError, ValueError) as error:
        reason, remedy = f"{error}".rstrip(". \n") + ".", "Change the model or its configuration before the training."
        raise CheckpointError(f"Cannot save this {type(model).__name__}.", reason, remedy) from error


def _save_pretrained(model: Any, folder: Path, state: dict[str, Any], *, safe: bool) -> None:
    knows_formats = "safe_serialization" in inspect.signature(model.save_pretrained).parameters
    model.save_pretrained(folder, state_dict=state, **({"safe_serialization": safe} if knows_formats else {}))
    if not (safe or knows_formats):  # transformers 5 writes safetensors only
        state = read_weights(folder)
        _remove_weights(folder)
        save_containers(state, folder / BIN_WEIGHTS)


def _remove_weights(folder: Path) -> None:
    for name in (WEIGHTS_INDEX, BIN_WEIGHTS_INDEX):
        shards = _shards_of(folder / name).values() if (folder / name).is_file() else ()
        for path in {name, *shards, WEIGHTS, BIN_WEIGHTS}:
            (folder / path).unlink(missing_ok=True)


def _renamed(model: Any, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Undo the renaming and regrouping of some architectures by transformers 5, using its own rules."""
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else None
    try:
        with preserved_rng():
            copied, report = type(model).from_pretrained(
                None, config=copy.deepcopy(model.config), state_dict=state, dtype=dtype, output_loading_info=True
            )
    except RuntimeError as error:
        raise _misfit(model, folder, str(error)) from error
    weights = {name: value for name, value in copied.state_dict().items() if name not in report["missing_keys"]}
    return {**weights, **{name: state[name] for name in report["unexpected_keys"]}}


def add_tied(state: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Add a missing name with the value of a loaded name that is the same tensor in the model."""
    # A split parameter has no memory to compare, but is the same object.
    names = {tensor_identity(own[name]) or id(own[name]): name for name in state if name in own}
    for name, tensor in own.items():
        source = names.get(tensor_identity(tensor) or id(tensor))
        if name not in state and source is not None:
            state[name] = state[source]


def _open_file(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return dict(open_tensors(path))
    state = load_containers(path)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise unreadable(path, f"It holds a {type(state).__name__}, not values by name")
    return state


def _shards_of(index: Path) -> dict[str, str]:
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(_SHARD.fullmatch(str(name)) for name in shards.values()):
        raise unreadable(index, "It does not map names to files next to it")
    return shards


def _open_files(folder: Path, index: Path) -> dict[str, Any]:
    shards = _shards_of(index)
    state: dict[str, Any] = {}
    for name in sorted(set(shards.values())):
        state.update(_open_file(folder / name))
    if state.keys() != shards.keys():
        raise unreadable(index, f"It and its files differ in {sorted(state.keys() ^ shards.keys())}")
    return state


def _misfit(model: torch.nn.Module, folder: Path, problem: str) -> CheckpointError:
    remedy = "Build the model as it was when the checkpoint was saved."
    return misfit(folder, f"Its weights and {type(model).__name__} do not fit: {problem}", remedy)


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
            raise _adapter_misfit(path, name, str(error)) from error
        if result.unexpected_keys and not model.peft_config[name].is_prompt_learning:  # whose names are not the model's
            raise _adapter_misfit(path, name, f"unexpected: {', '.join(result.unexpected_keys)}")


def _folder_of(model: Any, folder: Path, name: str) -> Path:
    return folder if name == "default" or _has_loaded_adapters(model) else folder / name


def _adapter_misfit(path: Path, name: str, problem: str) -> CheckpointError:
    remedy = "Build the model with the adapter configuration of the checkpoint."
    return misfit(path, f"The adapter {name!r} does not fit: {problem}", remedy)
