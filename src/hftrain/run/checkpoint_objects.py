"""Objects of the user that a checkpoint holds because they are declared, such as a second optimizer.

A Trainer, a task and a callback declare them with `checkpoint_objects`. What is not declared is not saved; a warning
names what changed all the same: optimizers that stepped, and what a callback or a task keeps to itself.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hftrain.checkpoint.fitting import check_optimizer, check_state, group_settings, restoring
from hftrain.checkpoint.manifest import DECLARED_OBJECTS, OWN_SHARDS
from hftrain.checkpoint.state_files import Keep, Writer
from hftrain.checkpoint.writer import saves_at_all
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.core.parameters import is_partitioned
from hftrain.core.types import Shard
from hftrain.loops.contract import LoopStates
from hftrain.run.parts import RunParts, checkpoint_object_owners
from hftrain.step.assemble import note_steps
from hftrain.storage.shards import load_shards, save_shards
from hftrain.storage.tensors import load_containers, memory_of
from hftrain.task.model_task import ModelTask

_STATEFUL_TYPES = (torch.Tensor, nn.Module, torch.Generator, LRScheduler, torch.amp.GradScaler)
_NUM_COMPARED = 256
# Objects of these packages are arguments, data and the run's own; their state is saved, or is none of training's.
_LIBRARIES = ("hftrain", "transformers", "accelerate", "datasets", "torch", "builtins")


# Those of all runs of this process, in other threads or in a callback, of which each saves its own.
_RUN_OPTIMIZERS: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class CheckpointObjects:
    """Save and restore what the user declares, for one run, and warn of other optimizers."""

    def __init__(self, parts: RunParts, loops: LoopStates) -> None:
        self._parts, self._loops = parts, loops
        self._shards: dict[str, Shard] = {}
        # States in a checkpoint for objects that do not exist yet.
        self._pending: dict[str, Any] = {}
        self._path = Path()
        self._has_begun = False
        # By identity; an optimizer that is no longer in use is gone.
        self._stepped_optimizers: dict[int, weakref.ref[Optimizer]] = {}
        # Undeclared ones that were looked at: each is warned of once.
        self._checked_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        # What callbacks and the task keep, when training began; empty after the first save.
        self._fingerprints: dict[str, Any] | None = None

    def begin(self) -> None:
        """Restore what exists once training has begun; the rest is restored before its optimizer's first step."""
        args = self._parts.args
        self._has_begun = True
        strategy = self._parts.strategy
        if not strategy.saves_objects and (strategy.shards_model or is_partitioned(self._parts.model)):
            self._refuse_weights()
        self._hooks.append(note_steps(self._stepped_optimizers))
        _RUN_OPTIMIZERS.update(each for each in self.saved_objects() if isinstance(each, Optimizer))
        missing = sorted(self.find().keys() - self._pending.keys())
        if missing and self._path.name:
            warn_once(f"The checkpoint has no state for {', '.join(missing)}: they start from scratch.")
        self._restore()
        if self._pending:
            self._hooks.append(register_optimizer_step_pre_hook(lambda *_: self._restore()))
        if saves_at_all(args, self._parts.save_policy) and not args.save_only_model:
            self._fingerprints = {name: _fingerprint(value) for name, value in self._unsaved_objects()}
        else:  # optimizers are noted in the first step only
            self._parts.pending.append(self._forget)

    def _forget(self) -> None:
        self._parts.pending.remove(self._forget)
        self._hooks[0].remove()

    def _refuse_weights(self) -> None:
        for name, value in self.find().items():
            if _holds_weights(value):
                raise StrategyError(
                    f"Cannot use {name} with strategy={self._parts.strategy.name!r}:",
                    "a process has parts of the parameters that only the engine can put together.",
                    "Use strategy='fsdp', 'ddp', or a ZeRO stage below 3.",
                )

    def find(self) -> dict[str, Any]:
        """Return the declared objects that exist now, by holder and name."""
        objects: dict[str, Any] = {}
        for owner, holder in checkpoint_object_owners(self._parts.trainer):
            declare = getattr(holder, "checkpoint_objects", None)
            for name, value in (declare() if callable(declare) else {}).items():
                full_name = f"{owner}.{name}"
                is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
                if full_name in objects or not (is_stateful or isinstance(value, (torch.Generator, torch.Tensor))):
                    raise ConfigError(
                        f"Cannot save {full_name}, which checkpoint_objects() of {type(holder).__name__} returned.",
                        "Two callbacks of this type return the name."
                        if full_name in objects
                        else f"A {type(value).__name__} has no state_dict() and load_state_dict().",
                        "Return objects with these methods, tensors and torch.Generators, by unique names.",
                    )
                objects[full_name] = value
        return objects

    def saved_objects(self) -> list[Any]:
        """Return the declared objects, and the forms of the run's optimizer, which have a file of their own."""
        optimizer = self._parts.optimizer
        return [optimizer, getattr(optimizer, "optimizer", None), self._parts.trainer.optimizer, *self.find().values()]

    def parameter_ids(self) -> set[int]:
        """Return the ids of the parameters that an optimizer of this run has."""
        optimizers = [each for each in (*self.saved_objects(), *self._undeclared()) if isinstance(each, Optimizer)]
        return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}

    def _undeclared(self) -> list[Optimizer]:
        saved_ids = set(map(id, self.saved_objects()))
        stepped = [each for reference in self._stepped_optimizers.values() if (each := reference()) is not None]
        return [each for each in stepped if id(each) not in saved_ids and each not in _RUN_OPTIMIZERS]

    def state_dict(self) -> dict[str, Any] | None:
        """Return their states by name, without the generators; None if there are none to save."""
        objects = self.find()
        states = {
            name: value.detach() if isinstance(value, torch.Tensor) else value.state_dict()
            for name, value in objects.items()
            if not isinstance(value, torch.Generator)
        }
        self._warn_of_optimizers(states)
        strategy = self._parts.strategy
        if not strategy.saves_objects:
            unsaved_names = [name for name in states if not _holds_weights(objects[name])]
            states = {name: state for name, state in states.items() if name not in unsaved_names}
            if unsaved_names:
                warn_once(
                    f"Checkpoints do not hold {', '.join(unsaved_names)}, and a resumed run starts them from scratch: "
                    f"strategy={strategy.name!r} splits the parameters over processes."
                )
        self._warn_of_parts({name: objects[name] for name in objects if name in states})
        states, self._shards = strategy.split_objects(states)
        return {**self._pending, **states} or None

    def capture_shards(self, keep: Keep) -> list[Writer]:
        """Return functions that write this process's shards of the states that `state_dict` returned last."""
        strategy, shards = self._parts.strategy, keep(self._shards)
        place = {"rank": strategy.rank, "world_size": strategy.world_size}
        return [lambda folder: save_shards(shards, folder, stem=OWN_SHARDS, **place)] if shards else []

    def load_weights(self, folder: Path) -> None:
        """Restore the objects that hold weights from a checkpoint, of which the model's weights have been loaded."""
        states = self._read(folder)
        self._pending = {
            name: states[name] for name, value in self.find().items() if _holds_weights(value) and name in states
        }
        self._restore()

    def _read(self, folder: Path) -> dict[str, Any]:
        """Return the saved states; of those that are split, each shard is put back at its path in its state."""
        file = folder / DECLARED_OBJECTS
        states: dict[str, Any] = dict(load_containers(file)) if file.exists() else {}
        for path_text, tensor in load_shards(folder, stem=OWN_SHARDS).items():
            *keys, last = json.loads(path_text)
            container = states
            for key in keys:
                container = container[key]
            container[last] = tensor
        return states

    def generator_states(self) -> dict[str, Any] | None:
        """Return the states of the declared generators of this process; None if there are none."""
        objects = self.find().items() if self._has_begun else ()
        return {name: value.get_state() for name, value in objects if isinstance(value, torch.Generator)} or None

    def load(self, folder: Path) -> None:
        """Read the states of a checkpoint; they are restored at once if training has begun."""
        self._path = folder / DECLARED_OBJECTS
        self._pending = self._read(folder)
        if self._has_begun:
            self._restore()

    def go_back(self, folder: Path) -> None:
        """Undo the groups that were added to optimizers since a checkpoint of this run, so that its states fit."""
        path, objects = folder / DECLARED_OBJECTS, self.find()
        for name, state in load_containers(path).items() if path.exists() else ():
            if isinstance(optimizer := objects.get(name), Optimizer) and "param_groups" in state:
                schedules = [each for each in objects.values() if getattr(each, "optimizer", None) is optimizer]
                extra("added_groups").dismiss_groups(optimizer, schedules, num=len(state["param_groups"]))

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Take the states of this process's generators."""
        self._pending.update(states)

    def close(self, *, is_complete: bool) -> None:
        """Warn of objects that were never created, and stop watching; safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._pending and is_complete:
            warn_once(
                f"The run was resumed from a checkpoint that holds the state of {', '.join(sorted(self._pending))}, "
                "which it never created. Return them from checkpoint_objects() under the same names."
            )

    def _restore(self) -> None:
        objects = self.find() if self._pending else {}
        # Optimizers first, because a schedule may write to one.
        names = sorted(self._pending.keys() & objects.keys(), key=lambda name: not isinstance(objects[name], Optimizer))
        for name in names:
            state, owner, strategy = self._pending.pop(name), objects[name], self._parts.strategy
            former_groups = group_settings(owner) if isinstance(owner, Optimizer) else []
            if not isinstance(owner, (torch.Generator, torch.Tensor, Optimizer)):
                if callable(make_room := getattr(owner, "make_room", None)):
                    with restoring(self._path):
                        make_room(state)  # what it holds now decides how the state is checked and split
                check_state(self._path, state, owner, own=owner.state_dict())
                state = strategy.split_object_like(state, owner.state_dict())
            with restoring(self._path):
                if isinstance(owner, torch.Tensor):
                    owner.detach().copy_(strategy.split_object_like(state, owner))
                elif isinstance(owner, torch.Generator):
                    owner.set_state(state)
                elif isinstance(owner, Optimizer):
                    strategy.load_optimizer_state(self._parts.wrapped, owner, state)
                    check_optimizer(self._path, owner, before=former_groups)
                else:
                    owner.load_state_dict(state)

    def _warn_of_optimizers(self, states: Mapping[str, Any]) -> None:
        """Warn of optimizers that stepped and whose state no part of the checkpoint holds."""

        def unsaved() -> list[Optimizer]:
            return [each for each in self._undeclared() if each.state and each not in self._checked_optimizers]

        # One that is out of use, such as that of another run, may still be part of a reference cycle.
        if unsaved():
            gc.collect()
        if not (others := unsaved()):
            return
        # One is saved if its tensors are part of a saved state, such as a loop's or that of an optimizer around it.
        saved_memory = memory_of([self._parts.optimizer.state_dict(), self._loops.state_dict(), states])
        names_by_id = {id(parameter): name for name, parameter in self._parts.task.named_parameters()}
        for optimizer in others:
            self._checked_optimizers.add(optimizer)
            state_memory = memory_of(list(optimizer.state.values()))
            if not state_memory or not state_memory <= saved_memory:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                names = filter(None, (names_by_id.get(id(parameter)) for parameter in parameters[:3]))
                description = ", ".join(names) or "parameters outside the model"
                warn_once(
                    f"Checkpoints do not hold the state of an optimizer that this run steps, and a resumed run starts "
                    f"it from scratch: {type(optimizer).__name__} of {description}. Return it, and its schedule, from "
                    "checkpoint_objects() of your Trainer, task or callback: {'name': optimizer}."
                )

    def _warn_of_parts(self, objects: Mapping[str, Any]) -> None:
        """Warn of a declared optimizer whose parameters or schedule are not saved with it."""
        modules = [self._parts.task, *(each for each in objects.values() if isinstance(each, nn.Module))]
        saved_ids = {id(parameter) for module in modules for parameter in module.parameters()}
        scheduled_ids = {id(each.optimizer) for each in objects.values() if isinstance(each, LRScheduler)}
        for name, value in objects.items():
            groups = value.param_groups if isinstance(value, Optimizer) else []
            if any(id(parameter) not in saved_ids for group in groups for parameter in group["params"]):
                warn_once(
                    f"Checkpoints hold the state of {name} but not all the weights that it trains. Make their module a "
                    "part of the model (or of a TaskModule), or return it from checkpoint_objects(), too."
                )
            # torch's schedules write `initial_lr` into the groups of their optimizer.
            if any("initial_lr" in group for group in groups) and id(value) not in scheduled_ids:
                warn_once(
                    f"Checkpoints hold the state of {name} but not its learning rate schedule, which a resumed run "
                    "starts from scratch. Return it from checkpoint_objects(), too."
                )

    def warn_of_changes(self) -> None:
        """Warn, at the first save, of what callbacks and the task keep and is not saved, if it has changed since."""
        if self._fingerprints is None:
            return
        former, self._fingerprints = self._fingerprints, None
        changes = ((name, value) for name, value in self._unsaved_objects() if former.get(name) != _fingerprint(value))
        changed = [f"{name} ({type(value).__name__})" for name, value in changes]
        if changed:
            warn_once(
                f"Checkpoints do not hold {', '.join(changed)}, which changes in training: a resumed run starts it "
                "from scratch. Return it from checkpoint_objects() of the Trainer, task or callback that keeps it: "
                "{'name': object}."
            )

    def _unsaved_objects(self) -> list[tuple[str, Any]]:
        """Return what callbacks and the task hold, also in containers, that is not saved, by name; for a warning."""
        task, trainer = self._parts.task, self._parts.trainer
        owners, objects = checkpoint_object_owners(trainer), self.saved_objects()
        declared_ids = set(map(id, objects))
        objects += [task, self._parts.wrapped, trainer.lr_scheduler, *trainer.loops.values()]
        objects += [metric for stage in ("train", "eval") for metric in task.metrics(stage).values()]
        modules = [module for each in objects if isinstance(each, nn.Module) for module in each.modules()]
        tensors = [tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))]
        saved_ids = {id(each) for each in (*objects, *modules, *(holder for _, holder in owners))}
        saved_memory = memory_of([*tensors, *objects])
        return [
            (f"{owner}.{name}", value)
            for owner, holder in owners
            # A callback may decide itself what of it is saved; the task of a plain model holds nothing else.
            if not hasattr(type(holder), "from_state")
            and not isinstance(holder, ModelTask)
            and id(holder) not in declared_ids
            for name, value in _with_helpers(holder, saved_ids)
            if isinstance(value, _STATEFUL_TYPES) and id(value) not in saved_ids
            # A Trainer's schedules are named with their optimizers.
            if not (owner == "trainer" and isinstance(value, LRScheduler))
            # A wrapper of the model has its parameters.
            if saved_memory.isdisjoint(memory_of(list(value.parameters()) if isinstance(value, nn.Module) else value))
        ]


def _holds_weights(value: Any) -> bool:
    """Return whether an object declares that its tensors are weights, such as averages of the model's."""
    return getattr(value, "holds_weights", False) is True


def members(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes and what is in those that are containers; for a warning only."""
    module_attributes = vars(nn.Module()) if isinstance(holder, nn.Module) else ()
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if name in module_attributes:
            continue
        if isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", member) for key, member in list(value.items()))
        elif isinstance(value, (list, tuple, set, deque)):
            yield from ((f"{name}[{index}]", member) for index, member in enumerate(value))
        else:
            yield name, value


def _with_helpers(holder: Any, saved_ids: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield an object's members, and those of helpers that it keeps, such as an object that averages weights."""
    for name, value in members(holder):
        yield name, value
        kind = type(value)
        is_helper = hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in _LIBRARIES
        is_data = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
        if is_helper and not is_data and not isinstance(value, _STATEFUL_TYPES) and id(value) not in saved_ids:
            yield from ((f"{name}.{member_name}", member) for member_name, member in members(value))


def _fingerprint(value: Any) -> Any:
    """Return what differs once a value has changed, with NaN as text, which equals itself; synchronises."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, nn.Module):
        return [_fingerprint(each) for each in (*value.parameters(), *value.buffers())]
    if not isinstance(value, torch.Tensor):
        return repr(value.state_dict())
    has_sum = memory_of(value) and not value.is_quantized and value.is_contiguous()
    if not has_sum or (value.is_floating_point() and value.itemsize == 1):
        return id(value)
    value = value.detach()
    total = value.sum(dtype=torch.float32 if value.is_floating_point() else None)
    return f"{total.item()}, {value.flatten()[:_NUM_COMPARED].tolist()}"
