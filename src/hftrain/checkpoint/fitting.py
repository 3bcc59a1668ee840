"""Check that the contents of a checkpoint fit the objects they are loaded into; errors name the file."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from hftrain.core.errors import CheckpointError, HFTrainError
from hftrain.core.tree import is_alike

# What these optimizers read at each step once a parameter has any state.
_NEEDED = {"Adam": {"exp_avg", "exp_avg_sq", "step"}, "AdamW": {"exp_avg", "exp_avg_sq", "step"}}
# Settings that change the computation of a step, or need additional state.
_MODES = {"amsgrad", "capturable", "centered", "differentiable", "maximize", "nesterov"}
# Settings that select one of torch's implementations of the same computation: True, False, or None for torch's choice.
_CHOICES = {"foreach", "fused"}
# Settings with a valid range.
_RANGED = {"alpha", "beta2_decay", "betas", "dampening", "eps", "eta", "etas", "initial_accumulator_value", "lambd",
           "lr", "lr_decay", "momentum", "momentum_decay", "rho", "step_sizes", "t0", "weight_decay"}  # fmt: skip
# torch's own whose state may have tensors of another shape than their parameter and more than one element.
_RESHAPING = ("Adafactor", "LBFGS", "SparseAdam")


@contextlib.contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Convert errors while loading the content of a file into a `CheckpointError` that names the file.

    Errors of hftrain, and memory and communication errors, are raised unchanged: the file does not cause them.
    """
    try:
        yield
    except (HFTrainError, MemoryError):
        raise
    except Exception as error:
        is_of_group = isinstance(error, getattr(torch.distributed, "DistError", ()))
        if is_of_group or any(phrase in str(error) for phrase in ("out of memory", "can't allocate memory")):
            raise
        raise misfit(path, f"It cannot be restored ({type(error).__name__}: {error})") from error


def check_state(path: Path, state: Mapping[str, Any], owner: Any, *, own: Mapping[str, Any]) -> None:
    """Raise if a state does not fit the object that it is for.

    Args:
        owner: The object that the state is for; its attributes outside the state must not be overwritten.
        own: The owner's current state. Its names must be present, except those that begin with an underscore.
    """
    for name in own.keys() | state.keys():
        if name not in state:
            if not name.startswith("_"):
                raise misfit(path, f"It has no {name!r}")
        elif name not in own:
            if not isinstance(name, str) or hasattr(owner, name):
                raise misfit(path, f"It would overwrite {name!r} of {type(owner).__name__}")
        elif not is_alike(state[name], own[name]) or (state[name] is None and type(own[name]) is int):
            raise misfit(path, f"Its {name!r} is a {type(state[name]).__name__} of another shape than the run's")


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups without their parameters, for `check_optimizer`."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def keep_choices(state: dict[str, Any], own: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's saved state with the implementations of this run, taken from the settings `own`.

    The saved ones may not exist on this run's device, and the groups decide how torch restores the step counts.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(own) or not all(isinstance(group, dict) for group in groups):
        return state
    choices = [{name: value for name, value in settings.items() if name in _CHOICES} for settings in own]
    return {**state, "param_groups": [{**group, **choice} for group, choice in zip(groups, choices, strict=True)]}


def check_optimizer(path: Path, optimizer: torch.optim.Optimizer, *, before: list[dict[str, Any]]) -> None:
    """Raise if the next step of a loaded optimizer would fail; `before` are its settings before loading."""
    for number, (settings, group) in enumerate(zip(before, optimizer.param_groups, strict=True)):
        for name, value in settings.items():
            is_fit = name in group and is_alike(group[name], value)
            is_fit = is_fit and (name not in _CHOICES or isinstance(group[name], (bool, NoneType)))
            if not is_fit or (name in _MODES and group[name] != value):
                raise misfit(path, f"{name!r} of group {number} is absent, or not what the optimizer has there")
        _check_ranges(path, optimizer, group)
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim.") and kind.__name__ not in _RESHAPING
    for parameter, state in optimizer.state.items() if is_torchs else ():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, Mapping):
            raise misfit(path, f"It has a state for {parameter!r:.80}, which is not a parameter")
        required = _NEEDED.get(kind.__name__, set())
        if state and not required <= state.keys():
            raise misfit(path, f"A parameter's state has only {sorted(map(str, state))}")
        for name, value in state.items():
            is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
            is_of_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if not is_of_shape and (name in required - {"step"} or (value is not None and not is_number)):
                raise misfit(path, f"{name!r} does not have the shape of its parameter, {list(parameter.shape)}")
            if name == "step" and not (is_number and float(value) >= 0):
                raise misfit(path, f"A parameter has been updated {value!r:.80} times")


def _check_ranges(path: Path, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Let torch's optimizer class validate a group's settings, as it does in its constructor."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        known = inspect.signature(kind).parameters.keys() & group.keys() & _RANGED
        with restoring(path):
            kind([torch.zeros(1)], **{name: group[name] for name in known})


def misfit(
    path: Path, reason: str, remedy: str = "Resume the run that was saved, or use another checkpoint."
) -> CheckpointError:
    """Return the error for a file that does not fit the run."""
    return CheckpointError(f"Cannot restore {path}.", f"{reason.rstrip('.')}.", remedy)
