"""Objects of the user that a checkpoint holds because they are declared, such as a second optimizer.

A Trainer, a task and a callback declare them with `checkpoint_objects`. What is not declared is not saved; a warning
names what changed all the same: optimizers that stepped, and what a callback or a task keeps to itself.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hftrain.checkpoint.fitting import check_optimizer, check_state, group_settings, restoring
from hftrain.checkpoint.layout import OWN_OPTIMIZERS
from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.optimizer_state import load_optimizer_state
from hftrain.core.tree import map_tensors
from hftrain.run.parts import Ready, RunParts, holders_of
from hftrain.step.assemble import Stepped
from hftrain.storage.tensors import load_containers, tensor_identity
from hftrain.strategies.base import has_engine
from hftrain.task.model_task import ModelTask

_KINDS = (torch.Tensor, nn.Module, torch.Generator, LRScheduler, torch.amp.GradScaler)
_NUM_COMPARED = 4096


class OwnOptimizers:
    """Save and restore what the user declares, for one run, and warn of other optimizers.

    Args:
        task: The run's task.
        known: Returns objects that the run already saves.
        saved: Returns the state that the run saves elsewhere.
    """

    def __init__(
        self, parts: RunParts, task: nn.Module, *, known: Callable[[], list[Any]], saved: Callable[[], Any]
    ) -> None:
        self._trainer, self._strategy, self._task = parts.trainer, parts.strategy, task
        self._known, self._saved = known, saved
        # States in a checkpoint for objects that do not exist yet.
        self._awaited: dict[str, Any] = {}
        self._path = Path()
        self._has_begun = False
        self._stepped = Stepped()
        # Optimizers that the run does not save, and of which nothing is left to say.
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Restore what exists once training has begun; the rest is restored before its optimizer's first step."""
        self._has_begun = True
        self._hooks.append(self._stepped.watch())
        missing = sorted(self.find().keys() - self._awaited.keys())
        if missing and self._path.name:
            warn_once(f"The checkpoint has no state for {', '.join(missing)}: they start from scratch.")
        self._restore()
        if self._awaited:
            self._hooks.append(register_optimizer_step_pre_hook(lambda *_: self._restore()))

    def find(self) -> dict[str, Any]:
        """Return the declared objects that exist now, by holder and name."""
        found: dict[str, Any] = {}
        for owner, holder in holders_of(self._trainer):
            declare = getattr(holder, "checkpoint_objects", None)
            for name, value in (declare() if callable(declare) else {}).items():
                where = f"{owner}.{name}"
                is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
                if where in found or not (is_stateful or isinstance(value, (torch.Generator, torch.Tensor))):
                    raise ConfigError(
                        f"Cannot save {where}, which checkpoint_objects() of {type(holder).__name__} returned.",
                        "Two callbacks of this type return the name."
                        if where in found
                        else f"A {type(value).__name__} has no state_dict() and load_state_dict().",
                        "Return objects with these methods, tensors and torch.Generators, by unique names.",
                    )
                found[where] = value
        return found

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that are declared, or have stepped in this run."""
        declared = [each for each in self.find().values() if isinstance(each, Optimizer)]
        stepped = [optimizer for each in self._stepped.found.values() if (optimizer := each()) is not None]
        return [*declared, *stepped]

    def state_dict(self) -> dict[str, Any] | None:
        """Return their states by name, without the generators; None if there are none to save."""
        found = self.find()
        self._tell_of_unsaved(found)
        states = _states(found)
        if states and self._is_split:
            warn_once(
                f"Checkpoints do not hold {', '.join(states)}, and a resumed run starts them from scratch: "
                f"strategy={self._strategy.name!r} splits the parameters over processes."
            )
            return None
        self._tell_of_parts(found)
        return {**self._awaited, **states} or None

    def generator_states(self) -> dict[str, Any] | None:
        """Return the states of the declared generators of this process; None if there are none."""
        found = self.find().items() if self._has_begun else ()
        return {name: each.get_state() for name, each in found if isinstance(each, torch.Generator)} or None

    def load(self, folder: Path) -> None:
        """Read the states of a checkpoint; they are restored at once if training has begun."""
        self._path = folder / OWN_OPTIMIZERS
        self._awaited = dict(load_containers(self._path)) if self._path.exists() and not self._is_split else {}
        if self._has_begun:
            self._restore()

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Take the states of this process's generators."""
        self._awaited.update(states)

    def forget(self) -> None:
        """Stop noting which optimizers step, in a run that saves none of them."""
        self._stepped.hook.remove()

    def close(self, *, is_complete: bool) -> None:
        """Warn of objects that were never created, and stop watching; safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._awaited and is_complete:
            warn_once(
                f"The run was resumed from a checkpoint that holds the state of {', '.join(sorted(self._awaited))}, "
                "which it never created. Return them from checkpoint_objects() under the same names."
            )

    @property
    def _is_split(self) -> bool:
        return any(has_engine(self._strategy, engine) for engine in ("fsdp", "deepspeed"))

    def _restore(self) -> None:
        if not self._awaited:
            return
        found = self.find()
        # Optimizers first, because a schedule may write to one.
        ready = sorted(self._awaited.keys() & found.keys(), key=lambda name: not isinstance(found[name], Optimizer))
        for name in ready:
            state, owner = self._awaited.pop(name), found[name]
            if isinstance(owner, (torch.Generator, torch.Tensor)):
                with restoring(self._path), torch.no_grad():
                    owner.copy_(state) if isinstance(owner, torch.Tensor) else owner.set_state(state)
            elif isinstance(owner, Optimizer):
                before = group_settings(owner)
                with restoring(self._path):
                    load_optimizer_state(owner, state)
                check_optimizer(self._path, owner, before=before)
            else:
                check_state(self._path, state, owner, own=owner.state_dict())
                with restoring(self._path):
                    owner.load_state_dict(state)

    def _tell_of_unsaved(self, found: Mapping[str, Any]) -> None:
        """Warn of optimizers that stepped and whose state no part of the checkpoint holds."""
        known = set(map(id, (*self._known(), *found.values())))

        def unknown() -> list[Optimizer]:
            new = (each for each in self.optimizers() if id(each) not in known and each not in self._checked)
            return [each for each in new if each.state]

        # One that is out of use, such as that of another run, may still be part of a reference cycle.
        if unknown():
            gc.collect()
        if others := unknown():
            held = _identities([self._saved(), _states(found)])
            names = {id(parameter): name for name, parameter in self._task.named_parameters()}
            for each in others:
                self._checked.add(each)
                own = _identities(each.state.values())
                if not own or not own <= held:
                    held_names = [names.get(id(p), "") for group in each.param_groups for p in group["params"]]
                    shown = ", ".join(filter(None, held_names[:3])) or "parameters outside the model"
                    warn_once(
                        f"Checkpoints do not hold the state of an optimizer that this run steps, and a resumed run "
                        f"starts it from scratch: {type(each).__name__} of {shown}. Return it, and its schedule, from "
                        "checkpoint_objects() of your Trainer, task or callback: {'name': optimizer}."
                    )

    def _tell_of_parts(self, found: Mapping[str, Any]) -> None:
        """Warn of a declared optimizer whose parameters or schedule are not saved with it."""
        modules = [self._task, *(each for each in found.values() if isinstance(each, nn.Module))]
        saved = {id(parameter) for module in modules for parameter in module.parameters()}
        driven = {id(each.optimizer) for each in found.values() if isinstance(each, LRScheduler)}
        for name, each in found.items():
            groups = each.param_groups if isinstance(each, Optimizer) else []
            if any(id(parameter) not in saved for group in groups for parameter in group["params"]):
                warn_once(
                    f"Checkpoints hold the state of {name} but not all the weights that it trains. Make their module a "
                    "part of the model (or of a TaskModule), or return it from checkpoint_objects(), too."
                )
            # torch's schedules leave it there.
            if any("initial_lr" in group for group in groups) and id(each) not in driven:
                warn_once(
                    f"Checkpoints hold the state of {name} but not its learning rate schedule, which a resumed run "
                    "starts from scratch. Return it from checkpoint_objects(), too."
                )


def _states(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of objects other than generators, which each process saves for itself."""
    return {
        name: each.detach() if isinstance(each, torch.Tensor) else each.state_dict()
        for name, each in found.items()
        if not isinstance(each, torch.Generator)
    }


def _identities(states: Iterable[Any]) -> set[Any]:
    """Return what identifies the tensors of nested structures."""
    found: set[Any] = set()
    map_tensors(list(states), lambda tensor: found.add(tensor_identity(tensor)))
    return found - {None}


class UnsavedState:
    """Compare what they hold at the first save with what they held when training began.

    What is found here only causes a warning: it never decides what is saved.

    Args:
        saved: Returns the objects of the user that checkpoints hold.
    """

    def __init__(self, parts: RunParts, ready: Ready, *, saved: Callable[[], Sequence[Any]]) -> None:
        self._parts, self._ready, self._saved = parts, ready, saved
        # None before training, and after the first save.
        self._marks: dict[str, Any] | None = None

    def begin(self) -> None:
        """Look at what they hold before the first step."""
        self._marks = {name: _mark(value) for name, value in self._held()}

    def check(self) -> None:
        """Warn of what has changed since; does nothing after the first call."""
        marks, self._marks = self._marks, None
        if marks is None:
            return
        changed = {
            name: type(value).__name__
            for name, value in self._held()
            if name not in marks or not _is_same(marks[name], _mark(value))
        }
        if changed:
            warn_once(
                f"Checkpoints do not hold {', '.join(f'{name} ({kind})' for name, kind in changed.items())}, which "
                "changes in training: a resumed run starts it from scratch. Return it from checkpoint_objects() of the "
                "task or callback that keeps it: {'name': object}."
            )

    def _held(self) -> list[tuple[str, Any]]:
        """Return what they hold directly or in a container, except what is saved, by attribute."""
        task, model = self._ready.task, self._ready.wrapped
        saved = [task, model, self._parts.trainer.lr_scheduler, *self._saved()]
        saved += [metric for stage in ("train", "eval") for metric in task.metrics(stage).values()]
        inside = [part for each in saved if isinstance(each, nn.Module) for part in each.modules()]
        tensors = [tensor for each in inside for tensor in (*each.parameters(False), *each.buffers(False))]
        known = {id(each) for each in (*saved, *inside)}
        memory = {_memory(tensor) for tensor in (*tensors, *saved) if isinstance(tensor, torch.Tensor)}
        return [
            (f"{owner}.{name}", value)
            for owner, holder in holders_of(self._parts.trainer)
            if holder is not None and owner != "trainer" and not _exports(holder)
            for name, value in members(holder)
            if isinstance(value, _KINDS) and id(value) not in known
            if not (isinstance(value, torch.Tensor) and _memory(value) in memory - {None})
        ]


def members(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes and what is in those that are containers; for a warning only."""
    hidden = vars(nn.Module()) if isinstance(holder, nn.Module) else ()
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if name in hidden:
            continue
        if isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", member) for key, member in list(value.items()))
        elif isinstance(value, (list, tuple, set, deque)):
            yield from ((f"{name}[{number}]", member) for number, member in enumerate(value))
        else:
            yield name, value


def _exports(holder: Any) -> bool:
    """Whether a callback decides itself what of it is saved, or a task is that of a plain model."""
    return hasattr(holder, "from_state") or isinstance(holder, ModelTask)


def _memory(tensor: torch.Tensor) -> Any:
    identity = tensor_identity(tensor)
    return None if identity is None else identity[:2]


def _mark(value: Any) -> Any:
    """Return what differs once a value has changed; synchronises."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, nn.Module):
        return [_mark(each) for each in (*value.parameters(), *value.buffers())]
    if not isinstance(value, torch.Tensor):
        return repr(value.state_dict())
    has_sum = _memory(value) is not None and not value.is_quantized and value.is_contiguous()
    if not has_sum or (value.is_floating_point() and value.itemsize == 1):
        return id(value)
    value = value.detach()
    total = value.sum(dtype=torch.float32 if value.is_floating_point() else None)
    return [total.cpu(), value.flatten()[:_NUM_COMPARED].cpu().clone()]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and bool(one == other)
