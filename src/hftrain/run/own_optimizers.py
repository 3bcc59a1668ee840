"""Optimizers, schedules and gradient scalers that user code keeps: saved and restored with those of the run.

They are found in attributes of the Trainer, of the task, of the model's modules, of callbacks, and of the user's
objects in these, directly or in lists, tuples and dicts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from hftrain.checkpoint.fitting import check_optimizer, check_state, group_settings, restoring
from hftrain.checkpoint.layout import OWN_OPTIMIZERS
from hftrain.core.log import warn_once
from hftrain.loops.contract import Loop
from hftrain.storage.tensors import load_containers
from hftrain.strategies.base import Strategy, has_engine

_KINDS = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
_DEPTH = 3
_MAX_MEMBERS = 256
_INTERNAL = frozenset(vars(nn.Module()))
# Packages whose objects do not contain optimizers of the user.
_NOT_USERS = frozenset(
    {*sys.stdlib_module_names, "accelerate", "datasets", "deepspeed", "hftrain", "numpy", "peft", "torch"}
    | {"tokenizers", "transformers"}
)


class OwnOptimizers:
    """Find, save and restore what user code keeps, for one run.

    Args:
        task: Its modules are searched.
        holders: Returns other objects to search, with their names.
        known: Returns objects that the run already saves.
    """

    def __init__(
        self,
        strategy: Strategy,
        task: nn.Module,
        *,
        holders: Callable[[], Sequence[tuple[str, Any]]],
        known: Callable[[], list[Any]],
    ) -> None:
        self._strategy, self._task, self._holders, self._known = strategy, task, holders, known
        # States in a checkpoint for objects that do not exist yet.
        self._awaited: dict[str, Any] = {}
        self._path = Path()
        self._hook: Any = None

    def find(self) -> dict[str, Any]:
        """Return the objects that exist now, by attribute path."""
        modules = [(f"task.{name}".rstrip("."), module) for name, module in self._task.named_modules()]
        first, *others = self._holders()
        holders = [first, *modules, *others]
        known = self._known()
        seen = set(map(id, known))
        # Each is searched under its own name.
        own = {id(holder) for _, holder in holders} | {id(each) for each in known if isinstance(each, Loop)}
        found = {}
        for owner, holder in holders:
            for name, value in _kept(_attributes(holder), own):
                if id(value) not in seen:
                    seen.add(id(value))
                    found[f"{owner}.{name}"] = value
        return found

    def state_dict(self) -> dict[str, Any] | None:
        """Return their states by attribute path; None if there are none to save."""
        found = self.find()
        if not found and not self._awaited:
            return None
        if self._is_split:
            warn_once(
                f"Checkpoints do not hold {', '.join(found)}, and a resumed run starts them from scratch: "
                f"strategy={self._strategy.name!r} splits the parameters over processes."
            )
            return None
        self._tell_of_weights(found)
        return {**self._awaited, **{name: each.state_dict() for name, each in found.items()}}

    def load(self, folder: Path) -> None:
        """Restore the states of a checkpoint; an object that does not exist yet is restored before its first step."""
        path = folder / OWN_OPTIMIZERS
        found = self.find()
        saved = load_containers(path) if path.exists() and not self._is_split else {}
        missing = sorted(found.keys() - saved.keys())
        if missing:
            warn_once(f"The checkpoint has no state for {', '.join(missing)}: they start from scratch.")
        self._path, self._awaited = path, dict(saved)
        self._restore()
        if self._awaited:
            # A trainer may create them in its first step.
            self._hook = register_optimizer_step_pre_hook(lambda *_: self._restore())

    def close(self, *, is_complete: bool) -> None:
        """Warn of objects that were never created, and stop waiting for them; safe to call twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._awaited and is_complete:
            warn_once(
                f"The run was resumed from a checkpoint that holds the state of {', '.join(sorted(self._awaited))}, "
                "which it never created. Keep them under the same names."
            )

    @property
    def _is_split(self) -> bool:
        return any(has_engine(self._strategy, engine) for engine in ("fsdp", "deepspeed"))

    def _restore(self) -> None:
        found = self.find()
        # Optimizers first, because a schedule may write to one.
        ready = sorted(self._awaited.keys() & found.keys(), key=lambda name: not isinstance(found[name], _KINDS[0]))
        for name in ready:
            state, owner = self._awaited.pop(name), found[name]
            if isinstance(owner, torch.optim.Optimizer):
                before = group_settings(owner)
                with restoring(self._path):
                    owner.load_state_dict(state)
                check_optimizer(self._path, owner, before=before)
            else:
                check_state(self._path, state, owner, own=owner.state_dict())
                with restoring(self._path):
                    owner.load_state_dict(state)
        if not self._awaited and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _tell_of_weights(self, found: Mapping[str, Any]) -> None:
        """Warn of parameters that are trained but not saved."""
        saved = {id(parameter) for parameter in self._task.parameters()}
        for name, each in found.items():
            groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else []
            if any(id(parameter) not in saved for group in groups for parameter in group["params"]):
                warn_once(
                    f"Checkpoints hold the state of {name} but not all the weights that it trains. Make their module a "
                    "part of the model (or of a TaskModule)."
                )


def _kept(members: Iterable[tuple[Any, Any]], others: Set[int], depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the objects among named values and inside them, by path; `others` are not searched."""
    for name, value in members:
        if isinstance(value, _KINDS):
            yield str(name), value
        elif depth and id(value) not in others:
            # Rows of data are not searched.
            rest = 0 if isinstance(value, (dict, list, tuple)) and len(value) > _MAX_MEMBERS else depth - 1
            yield from ((f"{name}.{path}", each) for path, each in _kept(_members(value), others, rest))


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        # A dict may be keyed by parameters.
        numbered = enumerate(list(value.items()))
        return ((key if isinstance(key, (str, int)) else number, member) for number, (key, member) in numbered)
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    kind = type(value)
    is_users = kind.__module__.partition(".")[0] not in _NOT_USERS and not isinstance(value, Dataset)
    return _attributes(value) if is_users else ()


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, without a module's parameters and submodules."""
    members = getattr(value, "__dict__", None)
    if not isinstance(members, dict):
        return []
    hidden = _INTERNAL if isinstance(value, nn.Module) else ()
    return [(name, member) for name, member in members.items() if name not in hidden]
