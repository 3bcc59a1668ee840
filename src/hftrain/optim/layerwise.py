"""Parameters by the names of their modules, and parameter groups with a learning rate per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError, suggest
from hftrain.optim.groups import parameter_groups


def find_named(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """Return the parameters of the modules that a pattern names, by name; a parameter may be named, too.

    Args:
        pattern: A path from `named_modules()`, in which ``*``, ``?`` and ``[0-3]`` stand for characters.

    Raises:
        ConfigError: It names nothing.

    Example:
        >>> list(find_named(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "[1-9]"))
        ['1.weight', '1.bias']
    """
    parameters = dict(model.named_parameters())
    matches = {name: parameter for name, parameter in parameters.items() if find_path(name, pattern)}
    if not matches:
        paths = sorted({path for name in parameters for path in accumulate(name.split("."), "{}.{}".format)})
        raise ConfigError(
            f"Cannot find {pattern!r} in {type(model).__name__}.",
            "No parameter has that path, or is in a module that has it.",
            suggest(pattern, paths),
        )
    return matches


def find_path(name: str, pattern: str) -> str | None:
    """Return the shortest beginning of a dotted name that a pattern matches; None if there is none."""
    return next((path for path in accumulate(name.split("."), "{}.{}".format) if fnmatchcase(path, pattern)), None)


def layerwise_groups(
    model: nn.Module,
    *,
    lr: float,
    rates: Mapping[str, float] | None = None,
    layers: Sequence[str] = (),
    decay: float = 1.0,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Return parameter groups of a model with a learning rate per layer, for any optimizer; schedules scale each.

    Parameters that nothing names have the rate `lr`. A parameter that several patterns name has the rate of the first.

    Args:
        lr: The highest rate.
        rates: Factors of `lr` by module, as patterns of `find_named`.
        layers: Patterns of modules from the input to the output, for `decay`; each module that a pattern with ``*``
            matches is a layer of its own, in model order.
        decay: The factor from each layer to the one before it: the last has the rate ``lr * decay``.
        weight_decay: That of the parameters that decay, see `Trainer.get_decay_parameter_names`.

    Raises:
        ConfigError: A pattern names nothing.

    Source: Howard and Ruder, 2018, arXiv 1801.06146 (discriminative fine-tuning).

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        >>> [group["lr"] for group in layerwise_groups(model, lr=0.4, layers=["[01]"], decay=0.5)]
        [0.1, 0.1, 0.2, 0.2, 0.4, 0.4]
    """
    factors: dict[str, float] = {}
    for pattern, factor in (rates or {}).items():
        factors.update({name: factor for name in find_named(model, pattern) if name not in factors})
    paths = {name: find_path(name, pattern) for pattern in layers for name in find_named(model, pattern)}
    order = list(dict.fromkeys(paths.values()))
    for name, path in paths.items():
        factors.setdefault(name, decay ** (len(order) - order.index(path)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for decays, group in zip((True, False), parameter_groups(model, weight_decay=weight_decay), strict=True):
        for parameter in group["params"]:
            factor = factors.get(names[id(parameter)], 1.0)
            empty = {"params": [], "lr": lr * factor, "weight_decay": group["weight_decay"]}
            groups.setdefault((factor, decays), empty)["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], not key[1]))]
