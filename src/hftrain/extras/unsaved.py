"""Warn of what a run changes and its checkpoints do not hold: optimizers, and what callbacks and tasks keep."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from hftrain.core.log import warn_once
from hftrain.loops.contract import LoopStates
from hftrain.run.checkpoint_objects import CheckpointObjects, members
from hftrain.run.parts import RunParts, checkpoint_object_owners
from hftrain.storage.tensors import memory_of
from hftrain.task.model_task import ModelTask

_KINDS = (torch.Tensor, nn.Module, torch.Generator, LRScheduler, torch.amp.GradScaler)
_NUM_COMPARED = 256
# Objects of these packages are arguments, data and the run's own; their state is saved, or is none of training's.
_LIBRARIES = ("hftrain", "transformers", "accelerate", "datasets", "torch", "builtins")


class Unsaved:
    """Compare what a run changes with what its checkpoints hold, and warn once of the rest."""

    def __init__(self, parts: RunParts, objects: CheckpointObjects, loops: LoopStates) -> None:
        self._parts, self._objects, self._loops = parts, objects, loops
        # Those of which nothing is left to say.
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # What callbacks and the task keep, when training began; empty after the first save.
        self._marks: dict[str, Any] | None = None

    def begin(self) -> None:
        """Note what callbacks and the task keep, for the first save."""
        self._marks = {name: _mark(value) for name, value in self._kept()}

    def tell_of_optimizers(self, states: Mapping[str, Any]) -> None:
        """Warn of optimizers that stepped and whose state no part of the checkpoint holds."""

        def unknown() -> list[Optimizer]:
            return [each for each in self._objects.others() if each.state and each not in self._checked]

        # One that is out of use, such as that of another run, may still be part of a reference cycle.
        if unknown():
            gc.collect()
        if not (others := unknown()):
            return
        # A loop's may be in the loop's state, and one inside the run's in the state of that.
        held = memory_of([self._parts.optimizer.state_dict(), self._loops.state_dict(), states])
        names = {id(parameter): name for name, parameter in self._parts.task.named_parameters()}
        for each in others:
            self._checked.add(each)
            own = memory_of(list(each.state.values()))
            if not own or not own <= held:
                trained = [names.get(id(p), "") for group in each.param_groups for p in group["params"]]
                shown = ", ".join(filter(None, trained[:3])) or "parameters outside the model"
                warn_once(
                    f"Checkpoints do not hold the state of an optimizer that this run steps, and a resumed run starts "
                    f"it from scratch: {type(each).__name__} of {shown}. Return it, and its schedule, from "
                    "checkpoint_objects() of your Trainer, task or callback: {'name': optimizer}."
                )

    def tell_of_parts(self, found: Mapping[str, Any]) -> None:
        """Warn of a declared optimizer whose parameters or schedule are not saved with it."""
        modules = [self._parts.task, *(each for each in found.values() if isinstance(each, nn.Module))]
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

    def tell_of_changes(self) -> None:
        """Warn, at the first save, of what callbacks and the task keep and is not saved, if it has changed since."""
        if self._marks is None:
            return
        marks, self._marks = self._marks, None
        changed = [(name, type(value).__name__) for name, value in self._kept() if marks.get(name) != _mark(value)]
        if changed:
            shown = ", ".join(f"{name} ({kind})" for name, kind in changed)
            warn_once(
                f"Checkpoints do not hold {shown}, which changes in training: a resumed run starts it from scratch. "
                "Return it from checkpoint_objects() of the Trainer, task or callback that keeps it: {'name': object}."
            )

    def _kept(self) -> list[tuple[str, Any]]:
        """Return what they hold directly or in a container, except what is saved, by attribute; for a warning only."""
        task, trainer = self._parts.task, self._parts.trainer
        saved = [task, self._parts.wrapped, trainer.lr_scheduler, *trainer.loops.values(), *self._objects.saved()]
        declared = set(map(id, self._objects.saved()))
        saved += [metric for stage in ("train", "eval") for metric in task.metrics(stage).values()]
        inside = [part for each in saved if isinstance(each, nn.Module) for part in each.modules()]
        tensors = [tensor for each in inside for tensor in (*each.parameters(False), *each.buffers(False))]
        known = {id(each) for each in (*saved, *inside, *(holder for _, holder in checkpoint_object_owners(trainer)))}
        memory = memory_of([*tensors, *saved])
        return [
            (f"{owner}.{name}", value)
            for owner, holder in checkpoint_object_owners(trainer)
            # A callback may decide itself what of it is saved; the task of a plain model holds nothing else.
            if not hasattr(type(holder), "from_state")
            and not isinstance(holder, ModelTask)
            and id(holder) not in declared
            for name, value in _with_helpers(holder, known)
            if isinstance(value, _KINDS) and id(value) not in known
            # A Trainer's schedules are named with their optimizers.
            if not (owner == "trainer" and isinstance(value, LRScheduler))
            # A wrapper of the model has its parameters.
            if memory.isdisjoint(memory_of(list(value.parameters()) if isinstance(value, nn.Module) else value))
        ]


def _with_helpers(holder: Any, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield an object's members, and those of helpers that it keeps, such as an object that averages weights."""
    for name, value in members(holder):
        yield name, value
        kind = type(value)
        is_helper = hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in _LIBRARIES
        is_data = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
        if is_helper and not is_data and not isinstance(value, _KINDS) and id(value) not in known:
            yield from ((f"{name}.{part}", member) for part, member in members(value))


def _mark(value: Any) -> Any:
    """Return what differs once a value has changed, with NaN as text, which equals itself; synchronises."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, nn.Module):
        return [_mark(each) for each in (*value.parameters(), *value.buffers())]
    if not isinstance(value, torch.Tensor):
        return repr(value.state_dict())
    has_sum = memory_of(value) and not value.is_quantized and value.is_contiguous()
    if not has_sum or (value.is_floating_point() and value.itemsize == 1):
        return id(value)
    value = value.detach()
    total = value.sum(dtype=torch.float32 if value.is_floating_point() else None)
    return f"{total.item()}, {value.flatten()[:_NUM_COMPARED].tolist()}"
