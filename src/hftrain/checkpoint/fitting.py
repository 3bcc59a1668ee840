"""Check that a checkpoint fits the objects it is loaded into, and find its position in a run of other batches."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from hftrain.core.errors import CheckpointError, HFTrainError
from hftrain.core.state import Progress
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


# Decide the order of the data, or the meaning of the optimizer's state: a difference is an error.
_FIXED = ("samples", "data_seed", "drop_last", "limits", "precision")
# Matter only within an epoch: an order that depends on the batch size, or on the random numbers of one process.
_FIXED_WITHIN = ("grouping", "seedable")
# A run may change these; a warning lists them.
_FREE = ("world_size", "batch_size", "accumulation", "precision")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGrid:
    """How a pass over the data is cut into batches.

    Units:
        round_size: samples of one micro-step, all ranks together (None: unknown, or not constant). accumulation:
        micro-steps per update. num_batches: micro-steps of a pass (None: unknown). num_samples: of a pass (None:
        unknown).
    """

    round_size: int | None
    accumulation: int
    num_batches: int | None
    num_samples: int | None

    @classmethod
    def of(cls, geometry: Mapping[str, Any], num_batches: int | None) -> BatchGrid:
        """Return the grid of a run, or of an Engine's loader, from the geometry in its checkpoints."""
        return cls(
            round_size=geometry.get("round_size"),
            accumulation=geometry.get("accumulation", 1),
            num_batches=num_batches,
            num_samples=geometry.get("samples"),
        )

    @property
    def steps_per_epoch(self) -> int:
        """Updates of a whole pass; its number of batches must be known."""
        return max(1, -(-(self.num_batches or 0) // self.accumulation))


def check_equal(saved: Mapping[str, Any], current: Mapping[str, Any], *, step: int) -> None:
    """Raise `CheckpointError` if a run differs from that of the checkpoint in a value that must not change.

    Args:
        current: Values of this run, such as ``optimizer``.
    """
    differences = [
        f"{name}={value!r} (the checkpoint has {saved.get(name)!r})"
        for name, value in current.items()
        if name not in saved or saved[name] != value
    ]
    if differences:
        raise CheckpointError(
            f"Cannot resume from step {step} with {', '.join(differences)}.",
            "With that the position in the data is lost, or the optimizer's state means something else.",
            "Resume with the values of the checkpoint, or start a new run from its weights.",
        )


def check_resumable(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, is_within_epoch: bool, step: int
) -> list[str]:
    """Raise `CheckpointError` if a run cannot continue where the checkpoint was saved; return what else has changed.

    Args:
        current: The ``geometry`` of this run; missing entries are not compared.
        is_within_epoch: Whether the checkpoint was saved in the middle of an epoch.

    Returns:
        Allowed differences, such as ``"batch_size 2 -> 4"``.
    """
    names = [*_FIXED, *(_FIXED_WITHIN if is_within_epoch else ())]
    if saved.get("weights_dtype") is not None and saved["weights_dtype"] == current.get("weights_dtype"):
        # Only the arithmetic changes, not the weights and the optimizer's state.
        names.remove("precision")
    # In these cases, a position is only valid with the same number of ranks.
    is_per_rank = saved.get("own_shares") or current.get("own_shares") or current.get("seedable") is False
    names += ["world_size"] if is_within_epoch and is_per_rank else []
    is_countable = saved.get("round_size") and current.get("round_size")
    # A limit is a number of batches: with others, the rest of the pass would be other samples.
    if is_within_epoch and (not is_countable or saved.get("limits")):
        names += ["world_size", "batch_size"]
    defaults: dict[str, Any] = {**{name: current.get(name) for name in _FIXED_WITHIN}, "limits": {}}
    check_equal({**defaults, **saved}, {name: current[name] for name in names if name in current}, step=step)
    changes = [name for name in _FREE if name in current and saved.get(name) != current[name]]
    return [f"{name} {saved.get(name)} -> {current[name]}" for name in changes]


def convert_position(progress: Progress, saved: BatchGrid, current: BatchGrid) -> Progress:
    """Return the same position in another grid; `saved.num_batches` is that of the pass the position is in."""
    micro_steps = progress.micro_steps_in_epoch
    old_round, new_round = saved.round_size, current.round_size
    if not (old_round and new_round) or old_round == new_round or not progress.is_within_epoch:
        return progress
    samples = progress.offset_in_epoch + micro_steps * old_round
    # A pass may have more samples than the dataset.
    num_samples = saved.num_samples or math.inf
    is_over = micro_steps >= saved.num_batches if saved.num_batches is not None else samples >= num_samples
    if is_over and current.num_batches is not None:
        return replace(progress, micro_steps_in_epoch=current.num_batches, offset_in_epoch=0)
    if is_over:
        return replace(progress, epoch=progress.epoch + 1, micro_steps_in_epoch=0, offset_in_epoch=0)
    micro_steps, offset = divmod(samples, new_round)
    return replace(progress, micro_steps_in_epoch=micro_steps, offset_in_epoch=offset)


def steps_left(progress: Progress, grid: BatchGrid, *, num_batches_first: int, num_steps: int) -> int:
    """Return how many updates a run needs from its position in `grid` to its planned end.

    Args:
        grid: How passes are cut; its number of batches must be known.
        num_batches_first: Micro-steps of the pass the position is in.
        num_steps: The updates of a whole run in this grid.
    """
    per_epoch, accumulation = grid.steps_per_epoch, grid.accumulation
    num_later = num_steps - (progress.epoch + 1) * per_epoch
    num_batches = num_batches_first - progress.micro_steps_in_epoch
    if num_later < 0:
        # It ends within this pass: subtract the micro-steps beyond the end.
        excess = num_batches_first - min(num_batches_first, (num_steps - progress.epoch * per_epoch) * accumulation)
        num_batches, num_later = num_batches - excess, 0
    return max(0, -(-num_batches // accumulation)) + num_later
