"""Warn once about a user's training: parameters in no optimizer, wrong gradients, modules that cannot learn, ..."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from hftrain.core.errors import listed
from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns
from hftrain.optim.schedules import follows_metric
from hftrain.run.checkpoint_objects import CheckpointObjects, members
from hftrain.run.parts import RunParts
from hftrain.step.stepper import has_own_steps
from hftrain.storage.tensors import memory_of
from hftrain.strategies.base import has_engine
from hftrain.strategies.checks import unused_parameters
from hftrain.task.model_task import ModelTask

NUM_UPDATES = 10


class TrainingChecks:
    """Check the gradients of the first update, and at each log for unfrozen parameters.

    Skipped for engines that split the parameters, or step themselves: their optimizer has other parameters.
    """

    def __init__(self, parts: RunParts, objects: CheckpointObjects) -> None:
        strategy, optimizer = parts.strategy, parts.optimizer
        self._parts, self._objects = parts, objects
        # What is open until the end of the first step, and what is open until the end of the run.
        self._first_step_stack, self._stack = ExitStack(), ExitStack()
        self._stack.callback(self._first_step_stack.close)
        self._frozen: list[tuple[str, nn.Parameter]] = []
        # Backward passes over each parameter since its gradient was None.
        self._passes: dict[torch.Tensor, int] = {}
        self._has_lost, self._begins_in_training = False, parts.task.model.training
        self._max_lead = math.inf  # how far the schedule's count of steps may be ahead of the updates
        is_split = Owns.STEP in strategy.owns or any(has_engine(strategy, engine) for engine in ("fsdp", "deepspeed"))
        if is_split or not isinstance(optimizer, torch.optim.Optimizer) or has_own_steps(optimizer):
            return
        self._frozen = [(name, p) for name, p in parts.model.named_parameters() if not p.requires_grad]
        # Of a wrapper that never called Optimizer.__init__, torch runs the hooks of the optimizer inside.
        self._first_step_stack.callback(register_optimizer_step_post_hook(self._check_first).remove)
        # Other steps and loops may run as many passes as they like.
        if not (
            parts.hooks.is_overridden("training_step")
            or parts.args.auto_find_batch_size
            or hasattr(optimizer, "update_in_backward")
            or "fit" in parts.loops
        ):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            for parameter in parameters:
                self._first_step_stack.callback(parameter.register_hook(partial(self._count, parameter)).remove)

    def begin(self) -> None:
        """Note how far a schedule of torch's is, if the loop steps it once per update."""
        parts, schedule = self._parts, self._parts.trainer.lr_scheduler
        is_torchs = isinstance(schedule, LRScheduler) and type(schedule).step.__module__ == LRScheduler.__module__
        steps_itself = "fit" in parts.loops or has_own_steps(parts.optimizer) or Owns.STEP in parts.strategy.owns
        if is_torchs and not steps_itself and hasattr(schedule, "last_epoch") and not follows_metric(schedule):
            self._max_lead = schedule.last_epoch - parts.progress.step

    def check_between_steps(self) -> None:
        """Warn of parameters that were unfrozen and are in no optimizer, and of steps of the schedule by other code."""
        step, schedule = self._parts.progress.step, self._parts.trainer.lr_scheduler
        if getattr(schedule, "last_epoch", 0) - step > self._max_lead:
            warn_once(
                "The learning rate schedule took more steps than the Trainer's one per update: other code steps it, "
                "too, and it ends early. Remove lr_scheduler.step() from callbacks and from the training step."
            )
        if any(parameter.requires_grad for _, parameter in self._frozen):
            held_ids = self._objects.parameter_ids()
            names = [name for name, p in self._frozen if p.requires_grad and id(p) not in held_ids]
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
            if names:
                warn_once(
                    f"{_subject(names)} no longer frozen, and no optimizer holds them: they are not trained. Add them "
                    "where they are unfrozen: optimizer.add_param_group({'params': [...]})."
                )

    def close(self) -> None:
        """Stop checking; safe to call twice."""
        self._stack.close()

    def _count(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        """Count a backward pass, before its gradient is added to that of the earlier ones."""
        num_before = self._passes.get(parameter, 0)
        self._has_lost |= parameter.grad is None and 0 < num_before < self._parts.args.gradient_accumulation_steps
        self._passes[parameter] = 1 if parameter.grad is None else num_before + 1

    def _check_first(self, stepped: torch.optim.Optimizer, *_: Any) -> None:
        parts, task, optimizer, pending = self._parts, self._parts.task, self._parts.optimizer, self._parts.pending
        if self._first_step_stack.close in pending or stepped.param_groups is not optimizer.param_groups:
            return
        # Not now: the optimizer's step goes through its hooks.
        pending.append(self._first_step_stack.close)
        self._first_step_stack.callback(pending.remove, self._first_step_stack.close)
        self._check_passes()
        is_separate = not hasattr(optimizer, "update_in_backward")
        unused = [name for name, p in self._parts.model.named_parameters() if p.requires_grad and p.grad is None]
        is_searching = getattr(self._parts.wrapped, "find_unused_parameters", None)  # None: this is not DDP
        is_static = getattr(self._parts.wrapped, "static_graph", False)
        if is_searching is False and not is_static and is_separate and unused:
            raise unused_parameters(unused)
        held_ids, groups = self._objects.parameter_ids(), optimizer.param_groups
        if is_separate and all(parameter.grad is None for group in groups for parameter in group["params"]):
            warn_once(
                "The first update changed nothing: no parameter had a gradient. Compute the loss from the model's "
                "outputs: torch.tensor(loss.item(), requires_grad=True) does not depend on them. An override of "
                "training_step must run the backward pass, as super().training_step(...) does."
            )
        if is_separate and not parts.args.torch_compile:
            num_left = parts.state.max_steps - parts.progress.step
            self._stack.callback(CutOff(task, optimizer, num_updates=num_left, pending=pending).close)
        reached = [name for name, p in task.named_parameters() if p.grad is not None and id(p) not in held_ids]
        if reached:
            warn_once(
                f"The loss depends on {len(reached)} parameters that no optimizer holds ({_subject(reached)} not "
                "trained). Give them to an optimizer, or freeze them with requires_grad_(False)."
            )
        hidden = [name for name, p in _unregistered_parameters(task) if p.grad is not None and id(p) not in held_ids]
        if hidden:
            warn_once(
                "The loss depends on parameters that are kept in a plain list, tuple or dict, or are no nn.Parameter "
                f"({_subject(hidden)} not trained, not saved and not moved to the device). Make a tensor an "
                "nn.Parameter, and keep lists in nn.ModuleList, nn.ModuleDict or nn.ParameterList, inside the model."
            )
        if not task.model.training and (self._begins_in_training or isinstance(task, ModelTask)):
            warn_once(
                "The step left the model in evaluation mode, without dropout: it seems to call eval(). Remove that "
                "call, or make it for the parts that are not trained."
            )

    def _check_passes(self) -> None:
        """Warn if a step ran a backward pass of its own over everything, or dropped gradients between micro-batches."""
        num, fewest = self._parts.args.gradient_accumulation_steps, min(self._passes.values(), default=0)
        task = self._parts.task
        is_plain = isinstance(task, ModelTask)
        step = (
            f"{type(self._parts.trainer).__name__}.compute_loss" if is_plain else f"{type(task).__name__}.training_step"
        )
        if fewest > num:
            warn_once(
                f"The first update added up the gradients of {fewest} backward passes, and it had {num} micro-"
                f"batch{'es' * (num > 1)}: {step} seems to call backward(), which the Trainer calls for the loss "
                "that it returns. Return the loss without calling backward()."
            )
        elif self._has_lost and fewest < num:
            warn_once(
                f"The first update lost the gradients of earlier micro-batches: {step} seems to call "
                f"zero_grad(). Remove zero_grad(); the Trainer drops the gradients after each update."
            )
        self._passes.clear()


def _unregistered_parameters(task: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters that torch does not find, in containers or as plain tensors, by attribute path."""
    registered = {id(parameter) for parameter in task.parameters()}
    for path, module in task.named_modules():
        for name, member in members(module):
            member_path = f"{path}.{name}".lstrip(".")
            if isinstance(member, nn.Module):
                parameters = [(f"{member_path}.{inner}", p) for inner, p in member.named_parameters()]
            else:
                is_trained = isinstance(member, torch.Tensor) and member.is_leaf and member.requires_grad
                parameters = [(member_path, member)] if is_trained else []
            yield from (pair for pair in parameters if id(pair[1]) not in registered)


def _subject(names: list[str]) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


class CutOff:
    """Watch the modules whose parameters got no gradient in the first update, until they get one.

    A missing gradient proves nothing, since an expert or a pooler may be idle. A module is reported if it has no
    gradient in any of the first updates, nothing else changed its parameters, and each of its passes ran under
    `no_grad`, or another module got its output detached. Without such modules nothing is watched.

    Args:
        optimizer: After its first step, with the gradients.
        num_updates: The number of updates of the run from this one on.
    """

    def __init__(
        self,
        task: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_updates: int,
        pending: list[Callable[[], None]],
    ) -> None:
        trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        silent = {p for p in trained if p.grad is None}
        is_useful = silent != trained and num_updates > 1
        self._watched = dict(_silent_parts(task, silent, "")) if is_useful else {}
        self._task, self._num_updates, self._num_seen = task, min(num_updates, NUM_UPDATES), 0
        # A moving average or a hand-written update changes all parameters, the smallest one too.
        modules = self._watched.items()
        self._smallest = {name: min(module.parameters(), key=torch.Tensor.numel) for name, module in modules}
        self._initial_values = {name: smallest.detach().clone() for name, smallest in self._smallest.items()}
        # By module: whether each pass had gradients, and the outputs of the last one.
        self._passes: dict[str, list[bool]] = {name: [] for name in self._watched}
        self._outputs: dict[str, list[torch.Tensor]] = {}
        self._detached: set[str] = set()
        self._trained: set[str] = set()
        self._stack = ExitStack()
        if self._watched:
            inside = {part for module in self._watched.values() for part in module.modules()}
            for part in (part for part in task.modules() if part not in inside):
                self._stack.callback(part.register_forward_pre_hook(self._find_detached, with_kwargs=True).remove)
            for name, module in self._watched.items():
                self._stack.callback(module.register_forward_hook(partial(self._note_pass, name)).remove)
                parameters = [p for p in module.parameters() if p in silent]
                note = partial(self._note_gradient, name)
                self._stack.callback(register_multi_grad_hook(parameters, note, mode="any").remove)
            pending.append(self._end_step)
            self._stack.callback(pending.remove, self._end_step)

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._stack.close()
        self._outputs.clear()

    def _note_gradient(self, name: str, _: torch.Tensor) -> None:
        self._trained.add(name)

    def _note_pass(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._task.training:
            self._passes[name].append(torch.is_grad_enabled())
            # Kept until the next pass, so that no other tensor can get their memory.
            tensors = self._outputs[name] = []
            if self._num_seen == 1:  # the second update
                map_tensors(outputs, tensors.append)

    def _find_detached(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        def compare(tensor: torch.Tensor) -> None:
            for name, outputs in () if tensor.requires_grad else self._outputs.items():
                if any(out.requires_grad and memory_of(out) & memory_of(tensor) for out in outputs):
                    self._detached.add(name)

        map_tensors((args, kwargs), compare)

    def _end_step(self) -> None:
        """Forget the outputs; after the last update, report the modules that never had a gradient."""
        self._num_seen += 1
        self._outputs.clear()
        untrained = self._watched.keys() - self._trained
        if untrained and self._num_seen < self._num_updates:
            return
        blind = {name for name, passes in self._passes.items() if passes and not any(passes)}
        for reason, affected in (("runs under torch.no_grad()", blind), ("has detached outputs", self._detached)):
            names = [name for name in self._watched if name in untrained & affected]
            names = [name for name in names if torch.equal(self._smallest[name].detach(), self._initial_values[name])]
            if names:
                warn_once(
                    f"{', '.join(names)} got no gradient in the first {self._num_seen} updates, although the optimizer "
                    f"holds the parameters: it {reason}. Compute it with gradients, or freeze it with "
                    "requires_grad_(False)."
                )
        self.close()


def _silent_parts(module: nn.Module, silent: set[nn.Parameter], path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules whose trainable parameters are all silent, with their paths."""
    for name, child in module.named_children():
        trained = [p for p in child.parameters() if p.requires_grad]
        is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # never called
        if trained and silent.issuperset(trained) and not is_container:
            yield f"{path}{name}", child
        else:
            yield from _silent_parts(child, silent, f"{path}{name}.")
