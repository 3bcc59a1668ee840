"""Parameter groups: with and without weight decay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError
from hftrain.core.parameters import whole_shape


def members_of(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that one stands for: its `members`, by name, if it has them, else itself."""
    return list(getattr(optimizer, "members", {"": optimizer}).values())


def decay_parameter_names(model: nn.Module) -> list[str]:
    """List the names of parameters that get weight decay; a tied parameter has all its names.

    Left out are parameters inside an `nn.LayerNorm`, and those whose lower-cased name contains ``bias``,
    ``layernorm`` or ``rmsnorm``, or has a component that is ``norm`` or ends in ``_norm``. All others decay, also
    those of other normalization layers, such as `nn.BatchNorm2d` and `nn.RMSNorm`.

    Source: the documented `Trainer.get_decay_parameter_names`.

    Example:
        >>> decay_parameter_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2)))
        ['0.weight', '2.weight']
    """
    return get_parameter_names(model, [nn.LayerNorm], [r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)"])


def get_parameter_names(
    model: nn.Module,
    forbidden_layer_types: Iterable[type[nn.Module]],
    forbidden_layer_names: Iterable[str] | None = None,
) -> list[str]:
    """List parameter names except those in layers of given types and those that match a pattern.

    Args:
        forbidden_layer_names: Regular expressions, searched for in lower-cased paths.

    Source: the documented `get_parameter_names`.

    Example:
        >>> get_parameter_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), [nn.LayerNorm], ["bias"])
        ['0.weight']
    """
    types, patterns = tuple(forbidden_layer_types), [re.compile(name) for name in forbidden_layer_names or ()]

    def is_allowed(path: str) -> bool:
        return not any(pattern.search(path.lower()) for pattern in patterns)

    names = [
        path
        for name, child in model.named_children()
        for inner in get_parameter_names(child, types, forbidden_layer_names)
        if not isinstance(child, types) and is_allowed(path := f"{name}.{inner}")
    ]
    # Slots that hold None count, as in code that iterates over `_parameters`.
    return names + [name for name in model._parameters if is_allowed(name)]


def get_model_param_count(model: nn.Module, trainable_only: bool = False) -> int:
    """Count a model's parameters; with DeepSpeed stage 3, over all ranks.

    Args:
        trainable_only: Leave out frozen ones.

    Source: the documented `get_model_param_count`.
    """
    parameters = (p for p in model.parameters() if p.requires_grad or not trainable_only)
    return sum(whole_shape(parameter).numel() for parameter in parameters)


def parameter_groups(
    model: nn.Module, *, weight_decay: float, decay_names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters in two groups, in model order: first with, then without weight decay.

    Args:
        decay_names: The names of the first group; `decay_parameter_names` by default.

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
            f"Cannot build an optimizer for {type(model).__name__}.",
            "The model has no trainable parameter.",
            "Set requires_grad=True on what should learn.",
        )
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _refuse_absent(names: set[str], model: nn.Module) -> None:
    # Slots that hold None (a norm without affine weights) count: code that iterates over `_parameters` lists them too.
    slots = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._parameters
    }
    absent = sorted(names - slots)
    if absent:
        raise ConfigError(
            f"Cannot decay the weights of {len(names)} named parameters.",
            f"{type(model).__name__} has no parameter {absent[0]!r}.",
            "Take the names from named_parameters() of this very model (a wrapper adds a prefix).",
            absent=absent[:5],
        )
