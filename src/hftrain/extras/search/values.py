"""Setting a trial's hyper-parameters in the arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from hftrain.arguments.fields import ArgumentFields, BatchArguments, DataArguments, OptimizationArguments
from hftrain.arguments.training import resolve
from hftrain.core.errors import ConfigError, suggest

_EXTRA = {"seed", "data_seed", "eval_steps", "save_steps", "logging_steps", "run_name", "metric_for_best_model"}
# Settings that each run reads again; the others are read once, when a Trainer is constructed.
SEARCHABLE = frozenset(
    {
        field.name
        for group in (OptimizationArguments, BatchArguments, DataArguments)
        for field in dataclasses.fields(group)
    }
    | _EXTRA
)
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}


def apply_hyperparameters(args: Any, values: Mapping[str, Any], *, is_for_model: bool) -> list[str]:
    """Set the arguments to a trial's values, cast to the types of the settings; mutates the arguments.

    Args:
        is_for_model: Whether to allow names that are not settings, for a `model_init` that takes the trial.

    Returns:
        The names that are not settings.
    """
    types = {field.name: str(field.type) for field in dataclasses.fields(args) if field.init}
    unknown = [name for name in values if name not in types]
    if unknown and not is_for_model:
        raise ConfigError(
            f"Cannot set the hyper-parameter {unknown[0]!r}.",
            f"{type(args).__name__} has no setting of that name, and model_init does not take the trial.",
            f"{suggest(unknown[0], SEARCHABLE)} Values for the model are read by a model_init(trial).",
        )
    documented = {field.name for field in dataclasses.fields(ArgumentFields)}
    fixed = [name for name in values if name in documented and name not in SEARCHABLE]
    if fixed:
        raise ConfigError(
            f"Cannot set the hyper-parameter {fixed[0]!r}.",
            "It defines how a Trainer is built, and is read once for all trials.",
            "Set it in the arguments, and make a Trainer for each of its values.",
            **{name: values[name] for name in fixed},
        )
    for name, kind in types.items():
        if name in values:
            setattr(args, name, _cast(name, values[name], kind))
    resolve(args)
    return unknown


def _cast(name: str, value: Any, kind: str) -> Any:
    """Return a value cast to a setting's type (its annotation); raise if that would change it."""
    value = value.item() if hasattr(value, "item") else value
    types = {name_of_type.strip() for name_of_type in kind.split("|")}
    if value is None or isinstance(value, Enum) or not types & {"int", "float", "bool"}:
        return value
    try:
        if "bool" in types:
            return value if isinstance(value, bool) or "str" in types else _TRUTHS[str(value).lower()]
        number = float(value)
        if "float" in types:
            return number
        if number.is_integer():
            return int(number)
    except (TypeError, ValueError, KeyError):
        pass
    raise ConfigError(
        f"Cannot set the hyperparameter {name!r}.",
        f"Its setting takes {kind}, which this value is not.",
        "Let the search space give values of that type (suggest_int for whole numbers).",
        **{name: value},
    )
