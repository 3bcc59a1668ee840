"""Parameter groups: which parameters decay and which do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError, explain


def decay_parameter_names(model: nn.Module) -> list[str]:
    """List the parameters that get weight decay, in model order; a tied parameter comes under each of its names.

    Left out are parameters inside an `nn.LayerNorm`, and those whose lower-cased name contains ``bias``,
    ``layernorm`` or ``rmsnorm``, or has a component that is ``norm`` or ends in ``_norm``.

    Source: the documented `Trainer.get_decay_parameter_names`.

    Example:
        >>> decay_parameter_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
        ['0.weight']
    """
    in_layernorm = tuple(
        f"{path}." if path else ""
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.LayerNorm)
    )
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in names if not name.startswith(in_layernorm) and not _is_bias_or_norm(name.lower())]


def _is_bias_or_norm(name: str) -> bool:
    if any(word in name for word in ("bias", "layernorm", "rmsnorm")):
        return True
    return any(part == "norm" or part.endswith("_norm") for part in name.split("."))


def parameter_groups(
    model: nn.Module, *, weight_decay: float, decay_names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters in two groups, in model order: first with, then without weight decay.

    Args:
        model: The model; frozen parameters are left out.
        weight_decay: The decay of the first group; the second has 0.
        decay_names: The names of the first group; `decay_parameter_names` by default.

    Raises:
        ConfigError: Nothing in the model is trainable, or `decay_names` holds a name the model does not have.

    Source: the documented `Trainer.create_optimizer`.

    Example:
        >>> [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2), weight_decay=0.1)]
        [1, 1]
    """
    names = set(decay_parameter_names(model)) if decay_names is None else set(decay_names)
    _refuse_absent(names, model)
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decaying if name in names else others).append(parameter)
    if not decaying and not others:
        raise ConfigError(
            explain(
                f"An optimizer for {type(model).__name__} was asked for.",
                "The model has no trainable parameter.",
                "Set requires_grad=True on what should learn.",
            )
        )
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _refuse_absent(names: set[str], model: nn.Module) -> None:
    # Slots that hold None (a norm without affine weights) count: walking `_parameters` by hand lists them too.
    slots = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._parameters
    }
    absent = sorted(names - slots)
    if absent:
        raise ConfigError(
            explain(
                f"Weight decay for {len(names)} named parameters was asked for.",
                f"{type(model).__name__} has no parameter {absent[0]!r}.",
                "Take the names from named_parameters() of this very model (a wrapper adds a prefix).",
                absent=absent[:5],
            )
        )
