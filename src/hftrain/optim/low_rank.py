"""Optimizers that project gradients of some linear modules to a low rank: module choice, groups and state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.optim.extras.in_backward import LayerWise
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, read_options

logger = get_logger(__name__)


def low_rank_class(
    cls: type[Optimizer],
    config: OptimizerConfig,
    model: nn.Module | None,
    *,
    low_rank: Mapping[str, Any],
    choices: Mapping[str, Sequence[str]],
    is_layerwise: bool,
    **settings: Any,
) -> OptimizerClass:
    """Pair a package's low-rank optimizer, made resumable, with its arguments.

    Args:
        low_rank: Options of the projected modules' groups, with defaults; `optim_args` can change them.
    """
    options = {**low_rank, **read_options(config, {key: type(value) for key, value in low_rank.items()})}
    invalid = [key for key, allowed in choices.items() if options[key] not in allowed]
    invalid += [key for key in ("rank", "update_proj_gap") if options[key] < 1]
    if invalid:
        key = invalid[0]
        raise ConfigError(
            f"Cannot use optim={config.name!r} with optim_args {key}={options[key]}.",
            f"{key} must be one of {', '.join(choices[key])}." if key in choices else f"{key} must be positive.",
            "Correct the value.",
            **{key: options[key]},
        )
    bases = (LayerWise, LowRank, cls) if is_layerwise else (LowRank, cls)
    subclass = type(f"LayerWise{cls.__name__}" if is_layerwise else cls.__name__, bases, {"__module__": cls.__module__})
    targets = find_targets(model, config)
    return subclass, {"lr": config.learning_rate, **settings, "targets": targets, "low_rank": options}


def find_targets(model: nn.Module | None, config: OptimizerConfig) -> list[nn.Parameter]:
    """List the trainable weights of the linear modules that `config.target_modules` names, in model order.

    A list holds parts of names, full paths or regular expressions for full paths; a string is one expression or
    ``"all-linear"``. Matching modules with parameters that are not linear are skipped with a warning.

    Source: the documented `optim_target_modules`.
    """
    patterns = config.target_modules
    are_texts = isinstance(patterns, str) or all(isinstance(pattern, str) for pattern in patterns or ())
    if model is None or not patterns or not are_texts:
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            "It treats the linear modules that optim_target_modules names, and needs the model to find them.",
            "Set optim_target_modules to a list of names, a regular expression, or 'all-linear'; pass the model.",
            optim_target_modules=patterns,
        )
    weights: list[nn.Parameter] = []
    skipped = []
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        if not _matches(path, patterns, is_linear=is_linear, config=config):
            continue
        if is_linear:
            weights.append(module.weight)
        elif any(True for _ in module.parameters(recurse=False)):
            skipped.append(path)
    if skipped:
        logger.warning(
            "optim=%r treats linear modules only; optim_target_modules also names: %s.", config.name, ", ".join(skipped)
        )
    weights = [weight for weight in weights if weight.requires_grad]
    if not weights:
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            "optim_target_modules matches no linear module with a trainable weight.",
            "Take the names from named_modules(), or use 'all-linear'.",
            optim_target_modules=patterns,
        )
    return weights


def _matches(path: str, patterns: str | Sequence[str], *, is_linear: bool, config: OptimizerConfig) -> bool:
    """Tell whether patterns name a module, by a part of its path or an expression for all of it."""
    if isinstance(patterns, str) and patterns.replace("_", "-") == "all-linear":
        return is_linear
    expressions = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, str) and any(part in path for part in patterns):
        return True
    try:
        return any(re.fullmatch(expression, path) for expression in expressions)
    except re.error as error:
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            f"optim_target_modules is not a valid regular expression: {error}.",
            "Correct it.",
            optim_target_modules=patterns,
        ) from error


class LowRank(Optimizer):
    """Put the projected weights in groups of their own, and keep the projections in the state dict.

    A mix-in for a package's class, which keeps a projection object in the state of each weight.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        targets: Iterable[torch.Tensor],
        low_rank: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        target_ids = {id(weight) for weight in targets}
        groups: list[dict[str, Any]] = []
        for group in params:
            parameters = group["params"]
            groups.append({**group, "params": [p for p in parameters if id(p) not in target_ids]})
            groups.append({**group, "params": [p for p in parameters if id(p) in target_ids], **low_rank})
        super().__init__([group for group in groups if group["params"]], **settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with projections as plain data."""
        packed = super().state_dict()
        state = {
            key: {**value, "projector": _whole(vars(value["projector"]))} if "projector" in value else value
            for key, value in packed["state"].items()
        }
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        projectors = {key: value.pop("projector") for key, value in state.items() if "projector" in value}
        super().load_state_dict({**state_dict, "state": state})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, parameters, strict=True):
            if key in projectors:
                # The averages have the projection's shape, by which no strategy splits.
                own_state = self.state[parameter]
                own_state.update({name: _place_like(value, parameter) for name, value in own_state.items()})
                own_state["projector"] = self._projector(projectors[key], parameter)

    def _projector(self, saved: Mapping[str, Any], parameter: torch.Tensor) -> Any:
        group = next(group for group in self.param_groups if any(parameter is p for p in group["params"]))
        projector = self.make_projector(group, self.state[parameter])
        for name, value in saved.items():
            setattr(projector, name, _place_like(value, parameter))
        return projector

    def make_projector(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        """Return a new projection object of the package for one weight."""
        raise NotImplementedError


def _whole(value: Any) -> Any:
    """Return a projection's values with whole tensors in place of DTensors. Collective, if there are any."""
    if isinstance(value, dict):
        return {name: _whole(element) for name, element in value.items()}
    if isinstance(value, list):
        return [_whole(element) for element in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _place_like(value: Any, parameter: torch.Tensor) -> Any:
    """Return tensors on a parameter's device, and on its mesh if it has one."""
    if isinstance(value, list):
        return [_place_like(element, parameter) for element in value]
    if not isinstance(value, torch.Tensor) or hasattr(value, "device_mesh"):
        return value
    tensor = value.to(parameter.device)
    if not hasattr(parameter, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
