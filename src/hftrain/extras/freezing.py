"""Freeze parts of a model for a while."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.lengths import read_length
from hftrain.core.types import Owns
from hftrain.optim.layerwise import find_named, find_path


class _Frozen(NamedTuple):
    until: Any
    parameters: list[nn.Parameter]
    hooks: list[Any]


class Freeze(TrainerCallback):
    """Freeze modules: their weights stay as they are, gradients are not computed, and statistics are not updated.

    The optimizer holds the frozen parameters from the start, so its groups, rates and schedules never change; they
    have no gradient and no state until they train. Normalization layers with running statistics normalize with those,
    as in evaluation. DDP and FSDP follow each change. What is frozen follows from the progress of the run alone, so a
    resumed run continues exactly. After the training, the parameters are as they were before it.

    Args:
        modules: The path of a module or a parameter in ``named_modules()``, in which ``*``, ``?`` and ``[0-3]`` stand
            for characters; several with a common `until`; or several with an `until` each. The longest freezing wins.
        until: When to unfreeze: after a number of updates, or ``"1ep"`` (passes), ``"500ba"`` (updates) or
            ``"0.1dur"`` (shares of the run). None never does.

    Raises:
        ConfigError: A pattern names nothing, `until` cannot be read or counts passes of a stream without a length, or
            the optimizer holds nothing of what is to be unfrozen, because it was frozen before.
        StrategyError: The engine fixes what is trained (DeepSpeed).

    Example:
        >>> gradual = Freeze({"encoder": "1ep", "embeddings": "2ep"})  # Trainer(..., callbacks=[gradual])
    """

    def __init__(self, modules: str | list[str] | Mapping[str, Any], until: str | float | None = None) -> None:
        names = [modules] if isinstance(modules, (str, nn.Module)) else modules
        ends = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, until)
        invalid = [end for end in ends.values() if end is not None and not _parse_end(end)[0]]
        if invalid or not ends or not all(isinstance(name, str) for name in ends):
            raise ConfigError(
                f"Cannot freeze {', '.join(map(repr, ends)) or 'no module'} until {(invalid or [until])[0]!r}.",
                "Modules are named by their paths; the end is a number of updates, or a length in 'ep', 'ba' or 'dur'.",
                "Write a path of model.named_modules(); the end like '1ep', '500ba' or '0.1dur', or leave it out.",
            )
        self.modules = ends
        self._frozen: list[_Frozen] = []

    def wrap_stepper(self, stepper: Any, *, strategy: Any, **_: Any) -> Any:
        """Return the calls of a step as they are; refuse an engine that fixes what is trained."""
        if Owns.STEP in strategy.owns:
            raise StrategyError(
                f"Cannot freeze {', '.join(map(repr, self.modules))} with strategy={strategy.name!r}.",
                "Its engine fixes the trained parameters when a run starts.",
                "Call requires_grad_(False) before train(), and end the run to unfreeze; or use another strategy.",
            )
        return stepper

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Freeze what is not due yet."""
        self.close_run()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        held_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for pattern, until in self.modules.items():
            if state.num_train_epochs == sys.maxsize and until is not None and _parse_end(until)[1] == "ep":
                raise ConfigError(
                    f"Cannot unfreeze {pattern!r} at {until!r}.",
                    "The data has no length, so passes cannot be counted.",
                    "Give the end in updates ('500ba') or shares of the run ('0.1dur').",
                )
            matches = find_named(model, pattern)
            # Others stay as they are: of a model with adapters, all but these were frozen before.
            if until is not None and not any(id(p) in held_ids for p in matches.values()):
                raise ConfigError(
                    f"Cannot unfreeze {pattern!r} at {until!r}.",
                    "The optimizer holds none of it: it was frozen before the optimizer was made.",
                    "Leave requires_grad on: Freeze turns it off.",
                )
        parameters = {name: p for name, p in find_named(model, "*").items() if id(p) in held_ids or p.requires_grad}
        # Those with running statistics: they would change although nothing is trained.
        norms = {path: m for path, m in model.named_modules() if getattr(m, "running_mean", None) is not None}
        ends = {path: self._latest_end(path, state) for path in (*parameters, *norms)}
        for until in dict.fromkeys(ends.values()):
            if until != "now":
                part = [p for name, p in parameters.items() if ends[name] == until]
                hooks = [m.register_forward_pre_hook(_set_eval) for path, m in norms.items() if ends[path] == until]
                self._frozen.append(_Frozen(until, part, hooks))
                for parameter in part:
                    parameter.requires_grad_(False)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Unfreeze what is due; also just after a resume, which restores what was frozen at the save."""
        self._unfreeze([group for group in self._frozen if _is_due(group.until, state)])

    def close_run(self) -> None:
        """Leave all parameters as they were before the training."""
        self._unfreeze(self._frozen[:])

    def _latest_end(self, path: str, state: Any) -> Any:
        """Return the longest `until` of the patterns for a path; ``"now"`` if there is none."""
        ends = [until for pattern, until in self.modules.items() if find_path(path, pattern)]
        return max(ends, key=lambda until: _share_of_run(until, state)) if ends else "now"

    def _unfreeze(self, groups: list[_Frozen]) -> None:
        for group in groups:
            for parameter in group.parameters:
                parameter.requires_grad_(True)
            for hook in group.hooks:
                hook.remove()
            self._frozen.remove(group)


def _parse_end(until: Any) -> tuple[float, str]:
    """Return the value and the unit of an end; the value is 0 if it cannot be read."""
    if isinstance(until, (int, float)) and not isinstance(until, bool):
        return max(float(until), 0.0), "ba"
    length = read_length(until)
    return (length.value, length.unit) if length is not None and length.unit in ("ep", "ba", "dur") else (0.0, "ba")


def _is_due(until: Any, state: Any) -> bool:
    progress = {"ep": state.epoch or 0.0, "ba": state.global_step, "dur": state.global_step / state.max_steps}
    return until is not None and progress[_parse_end(until)[1]] >= _parse_end(until)[0]


def _share_of_run(until: Any, state: Any) -> float:
    """Return after which share of the run it ends, to compare ends in several units."""
    value, unit = (math.inf, "dur") if until is None else _parse_end(until)
    return float(value / {"ep": state.num_train_epochs, "ba": state.max_steps, "dur": 1}[unit])


def _set_eval(module: nn.Module, inputs: Any) -> None:
    module.eval()
