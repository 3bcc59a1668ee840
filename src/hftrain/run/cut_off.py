"""Warn once of modules that cannot learn, because they run under `torch.no_grad()` or their outputs are detached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.storage.tensors import memory_of

NUM_UPDATES = 10


class CutOff:
    """Watch the modules whose parameters got no gradient in the first update, until they get one.

    A missing gradient proves nothing, since an expert or a pooler may be idle. A module is reported if it has no
    gradient in any of the first updates, nothing else changed its parameters, and each of its passes ran under
    `no_grad`, or another module got its output detached. Without such modules nothing is watched.

    Args:
        task: Its modules are watched.
        optimizer: After its first step, with the gradients.
        num_updates: The number of updates of the run from this one on.
        pending: Functions that are called at the end of each step.
    """

    def __init__(
        self,
        task: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_updates: int,
        pending: list[Callable[[], None]],
    ) -> None:
        held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        silent = {p for p in held if p.grad is None}
        is_asked = silent != held and num_updates > 1
        found = dict(_silent_parts(task, silent, "")) if is_asked else {}
        self._task, self._num_updates, self._num_seen = task, min(num_updates, NUM_UPDATES), 0
        self._watched = {name: _Watched(module) for name, module in found.items()}
        self._stack = ExitStack()
        if found:
            inside = {part for module in found.values() for part in module.modules()}
            for part in (part for part in task.modules() if part not in inside):
                self._stack.callback(part.register_forward_pre_hook(self._read, with_kwargs=True).remove)
            for each in self._watched.values():
                self._stack.callback(each.module.register_forward_hook(self._note(each)).remove)
                parameters: list[Any] = [p for p in each.module.parameters() if p in silent]
                for parameter in parameters:
                    self._stack.callback(parameter.register_hook(each.note_gradient).remove)
            pending.append(self._end_step)
            self._stack.callback(pending.remove, self._end_step)

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._stack.close()
        self._watched.clear()

    def _note(self, watched: _Watched) -> Any:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if self._task.training:
                watched.num_passes += 1
                watched.num_without_grad += not torch.is_grad_enabled()
                # Kept until the next pass, so that no other tensor can get their memory.
                watched.outputs.clear()
                if self._num_seen == 1:  # the second update
                    map_tensors(outputs, watched.outputs.append)

        return hook

    def _read(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        def compare(tensor: torch.Tensor) -> None:
            for each in () if tensor.requires_grad else self._watched.values():
                each.is_detached |= any(
                    out.requires_grad and memory_of(out) & memory_of(tensor) for out in each.outputs
                )

        map_tensors((args, kwargs), compare)

    def _end_step(self) -> None:
        """Forget the modules that have had a gradient; after the last update, report those that remain."""
        self._num_seen += 1
        self._watched = {name: each for name, each in self._watched.items() if not each.has_gradient}
        for each in self._watched.values():
            each.outputs.clear()
        if self._watched and self._num_seen < self._num_updates:
            return
        for reason, flag in (
            ("runs under torch.no_grad()", "is_without_grad"),
            ("has detached outputs", "is_detached"),
        ):
            left = self._watched.items()
            names = [name for name, each in left if getattr(each, flag) and not each.has_changed()]
            if names:
                warn_once(
                    f"{', '.join(names)} got no gradient in the first {self._num_seen} updates, although the optimizer "
                    f"holds the parameters: it {reason}. Compute it with gradients, or freeze it with "
                    "requires_grad_(False)."
                )
        self.close()


class _Watched:
    """One module, and what its passes have shown."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_passes = self.num_without_grad = 0
        self.is_detached = self.has_gradient = False
        self.outputs: list[torch.Tensor] = []
        # A moving average or a hand-written update changes all parameters, the smallest one too.
        self._smallest = min(module.parameters(), key=torch.Tensor.numel)
        self._before = self._smallest.detach().clone()

    @property
    def is_without_grad(self) -> bool:
        return self.num_without_grad == self.num_passes > 0

    def note_gradient(self, _: torch.Tensor) -> None:
        self.has_gradient = True

    def has_changed(self) -> bool:
        return not torch.equal(self._smallest.detach(), self._before)


def _silent_parts(module: nn.Module, silent: set[nn.Parameter], path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules whose trainable parameters are all silent, with their paths."""
    for name, child in module.named_children():
        trained = [p for p in child.parameters() if p.requires_grad]
        is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # never called
        if trained and silent.issuperset(trained) and not is_container:
            yield f"{path}{name}", child
        else:
            yield from _silent_parts(child, silent, f"{path}{name}.")
