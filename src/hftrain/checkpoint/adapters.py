"""PEFT adapters in a folder: only the adapter weights, in PEFT's own format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger
from hftrain.storage.tensors import load_containers, load_tensors

logger = get_logger(__name__)

_WEIGHTS, _BIN_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"


def saves_adapters(model: torch.nn.Module) -> bool:
    """Tell whether a model is a `PeftModel`, which saves only its adapters.

    A `PeftMixedModel` cannot save itself; its weights are saved whole.
    """
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def save_adapters(model: Any, folder: Path, state: Mapping[str, Any], *, safe: bool) -> None:
    """Write every adapter with its configuration, from a whole model's state; replaces older adapter weights."""
    for name in model.peft_config:
        for file in (_WEIGHTS, _BIN_WEIGHTS):
            (_folder_of(folder, name) / file).unlink(missing_ok=True)
    model.save_pretrained(folder, state_dict=dict(state), safe_serialization=safe)


def load_adapters(model: Any, folder: Path) -> None:
    """Overwrite every adapter of a model, and other trained modules saved with it, in place.

    Raises:
        CheckpointError: An adapter's weights are missing, damaged, or do not fit.
    """
    from peft import set_peft_model_state_dict

    for name in model.peft_config:
        where = _folder_of(folder, name)
        path = where / (_WEIGHTS if (where / _WEIGHTS).is_file() else _BIN_WEIGHTS)
        state = load_tensors(path) if path.name == _WEIGHTS else load_containers(path)
        try:
            result = set_peft_model_state_dict(model, state, adapter_name=name)
        except RuntimeError as error:
            raise _unfit(path, name, str(error)) from error
        unexpected = getattr(result, "unexpected_keys", None)
        if unexpected is None:
            logger.warning("This version of peft cannot check whether adapters fit; install peft>=0.14.")
        elif unexpected:
            raise _unfit(path, name, f"unexpected: {', '.join(unexpected)}")


def _folder_of(folder: Path, name: str) -> Path:
    return folder if name == "default" else folder / name


def _unfit(path: Path, name: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot load the adapter {name!r} from {path}.",
        f"It does not fit: {problem}.",
        "Build the model with the adapter configuration of the checkpoint.",
    )
