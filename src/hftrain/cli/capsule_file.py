"""The file of a capsule: tensors in safetensors, all else as JSON in its metadata. Reading it runs no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hftrain.core.errors import ConfigError, a_kind, listed

_KEY = "hftrain.capsule.1"
_KINDS = {"dict": dict, "list": list, "tuple": tuple}
_PARTS = (
    *("run", "step", "command", "make", "model", "precision", "settings", "sources", "hashes", "around", "expected"),
    *("batches", "weights", "trained", "evaluating", "optimizer", "scaler", "random", "epoch"),
)


def packed(capsule: Mapping[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return a capsule as JSON, and the tensors in it by where they were; `ConfigError` for objects in it."""
    tensors: dict[str, torch.Tensor] = {}
    return json.dumps({name: _encode(capsule[name], name, tensors) for name in _PARTS}), tensors


def write(path: Path, text: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write what `packed` returned."""
    save_file(tensors, path, {_KEY: text})


def read(path: Path) -> dict[str, Any]:
    """Return a capsule; `ConfigError` if it is damaged or names files outside of its folder."""
    try:
        with safe_open(path, framework="pt") as file:  # which checks sizes and offsets
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        capsule = {name: _decode(node, tensors) for name, node in json.loads(metadata[_KEY]).items()}
        names = [*capsule["sources"], *capsule["hashes"], (capsule["make"] or ".py").partition(":")[0]]
        wrong = [name for name in _PARTS if name not in capsule] + [name for name in names if not _is_inside(name)]
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"It is not a capsule of this version, or damaged: {type(error).__name__}: {error}."
        raise ConfigError(f"Cannot open {path}.", why, "Ask for another copy.") from error
    if wrong:
        why = f"A part is missing, or a name is not that of a Python file in a folder: {listed(wrong)}."
        raise ConfigError(f"Cannot open {path}.", why, "Do not trust it.")
    return capsule


def _is_inside(name: str) -> bool:
    """Return whether a Python file of this name, joined to a folder, lies in that folder on every system."""
    parts = PurePosixPath(name)
    return name.endswith(".py") and not (parts.is_absolute() or ".." in parts.parts or {"\\", ":", "\0"} & {*name})


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON: tensors as references, containers with their kind; mappings become dicts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        tensors[where] = value.detach().cpu().contiguous().clone()
        return {"tensor": where}
    if isinstance(value, Mapping):
        return {"dict": [[key, _encode(each, f"{where}/{key}", tensors)] for key, each in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(each, f"{where}/{i}", tensors) for i, each in enumerate(value)]}
    remedy = "It can hold tensors, numbers, text, lists, tuples and mappings."
    raise ConfigError(f"Cannot put {where} into a capsule.", f"It is {a_kind(value)}.", remedy)


def _decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tensor":
        return tensors[value]
    pairs = ((key, _decode(each, tensors)) for key, each in value) if kind == "dict" else None
    return _KINDS[kind](pairs or (_decode(each, tensors) for each in value))
