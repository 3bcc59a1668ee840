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
    chosen = {**low_rank, **read_options(config, {key: type(value) for key, value in low_rank.items()})}
    wrong = [key for key, allowed in choices.items() if chosen[key] not in allowed]
    wrong += [key for key in ("rank", "update_proj_gap") if chosen[key] < 1]
    if wrong:
        key = wrong[0]
        raise ConfigError(
            f"Cannot use optim={config.name!r} with optim_args {key}={chosen[key]}.",
            f"{key} must be one of {', '.join(choices[key])}." if key in choices else f"{key} must be positive.",
            "Correct the value.",
            **{key: chosen[key]},
        )
    bases = (LayerWise, LowRank, cls) if is_layerwise else (LowRank, cls)
    made = type(f"LayerWise{cls.__name__}" if is_layerwise else cls.__name__, bases, {"__module__": cls.__module__})
    targets = find_targets(model, config)
    return made, {"lr": config.learning_rate, **settings, "targets": targets, "low_rank": chosen}


def find_targets(model: nn.Module | None, config: OptimizerConfig) -> list[nn.Parameter]:
    """List the trainable weights of the linear modules that `config.target_modules` names, in model order.

    A list holds parts of names, full paths or regular expressions for full paths; a string is one expression or
    ``"all-linear"``. Matching modules with parameters that are not linear are skipped with a warning.

    Source: the documented `optim_target_modules`.
    """
    wanted = config.target_modules
    is_given = bool(wanted) and (isinstance(wanted, str) or all(isinstance(each, str) for each in wanted or ()))
    if model is None or not is_given:
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            "It treats the linear modules that optim_target_modules names, and needs the model to find them.",
            "Set optim_target_modules to a list of names, a regular expression, or 'all-linear'; pass the model.",
            optim_target_modules=wanted,
        )
    assert wanted is not None
    found: list[nn.Parameter] = []
    others = []
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        if not _matches(path, wanted, is_linear=is_linear, config=config):
            continue
        if is_linear:
            found.append(module.weight)
        elif any(True for _ in module.parameters(recurse=False)):
            others.append(path)
    if others:
        logger.warning(
            "optim=%r treats linear modules only; optim_target_modules also names: %s.", config.name, ", ".join(others)
        )
    found = [weight for weight in found if weight.requires_grad]
    if not found:
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            "optim_target_modules matches no linear module with a trainable weight.",
            "Take the names from named_modules(), or use 'all-linear'.",
            optim_target_modules=wanted,
        )
    return found


def _matches(path: str, wanted: str | Sequence[str], *, is_linear: bool, config: OptimizerConfig) -> bool:
    if isinstance(wanted, str) and wanted.replace("_", "-") == "all-linear":
        return is_linear
    expressions = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(wanted, str) and any(part in path for part in wanted):
        return True
    try:
        return any(re.fullmatch(expression, path) for expression in expressions)
    except re.error as error:
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            f"optim_target_modules is not a valid regular expression: {error}.",
            "Correct it.",
            optim_target_modules=wanted,
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
        treated = {id(weight) for weight in targets}
        groups: list[dict[str, Any]] = []
        for group in params:
            members = group["params"]
            groups.append({**group, "params": [p for p in members if id(p) not in treated]})
            groups.append({**group, "params": [p for p in members if id(p) in treated], **low_rank})
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
        saved = {key: value.pop("projector") for key, value in state.items() if "projector" in value}
        super().load_state_dict({**state_dict, "state": state})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        members = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, members, strict=True):
            if key in saved:
                own = self.state[parameter]  # whose averages have the projection's shape, by which no strategy splits
                own.update({name: _moved(value, parameter) for name, value in own.items()})
                own["projector"] = self._projector(saved[key], parameter)

    def _projector(self, saved: Mapping[str, Any], parameter: torch.Tensor) -> Any:
        group = next(group for group in self.param_groups if any(parameter is p for p in group["params"]))
        projector = self.make_projector(group, self.state[parameter])
        for name, value in saved.items():
            setattr(projector, name, _moved(value, parameter))
        return projector

    def make_projector(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        """Return a new projection object of the package for one weight."""
        raise NotImplementedError


def _whole(value: Any) -> Any:
    """Return a projection's values with whole tensors in place of DTensors. Collective, if there are any."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _moved(value: Any, parameter: torch.Tensor) -> Any:
    """Return tensors on a parameter's device, and on its mesh if it has one."""
    if isinstance(value, list):
        return [_moved(each, parameter) for each in value]
    if not isinstance(value, torch.Tensor) or hasattr(value, "device_mesh"):
        return value
    moved = value.to(parameter.device)
    if not hasattr(parameter, "device_mesh"):
        return moved
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(moved, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False)
