"""Warn once of modules that cannot learn, because they run under `torch.no_grad()` or their outputs are detached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

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
        held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        silent = {p for p in held if p.grad is None}
        is_asked = silent != held and num_updates > 1
        self._watched = dict(_silent_parts(task, silent, "")) if is_asked else {}
        self._task, self._num_updates, self._num_seen = task, min(num_updates, NUM_UPDATES), 0
        # A moving average or a hand-written update changes all parameters, the smallest one too.
        self._smallest = {name: min(each.parameters(), key=torch.Tensor.numel) for name, each in self._watched.items()}
        self._before = {name: smallest.detach().clone() for name, smallest in self._smallest.items()}
        # By module: whether each pass had gradients, and the outputs of the last one.
        self._passes: dict[str, list[bool]] = {name: [] for name in self._watched}
        self._outputs: dict[str, list[torch.Tensor]] = {}
        self._detached: set[str] = set()
        self._trained: set[str] = set()
        self._stack = ExitStack()
        if self._watched:
            inside = {part for module in self._watched.values() for part in module.modules()}
            for part in (part for part in task.modules() if part not in inside):
                self._stack.callback(part.register_forward_pre_hook(self._read, with_kwargs=True).remove)
            for name, module in self._watched.items():
                self._stack.callback(module.register_forward_hook(partial(self._note, name)).remove)
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

    def _note(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._task.training:
            self._passes[name].append(torch.is_grad_enabled())
            # Kept until the next pass, so that no other tensor can get their memory.
            kept = self._outputs[name] = []
            if self._num_seen == 1:  # the second update
                map_tensors(outputs, kept.append)

    def _read(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        def compare(tensor: torch.Tensor) -> None:
            for name, outputs in () if tensor.requires_grad else self._outputs.items():
                if any(out.requires_grad and memory_of(out) & memory_of(tensor) for out in outputs):
                    self._detached.add(name)

        map_tensors((args, kwargs), compare)

    def _end_step(self) -> None:
        """Forget the outputs; after the last update, report the modules that never had a gradient."""
        self._num_seen += 1
        self._outputs.clear()
        left = self._watched.keys() - self._trained
        if left and self._num_seen < self._num_updates:
            return
        blind = {name for name, passes in self._passes.items() if passes and not any(passes)}
        for reason, found in (("runs under torch.no_grad()", blind), ("has detached outputs", self._detached)):
            names = [name for name in self._watched if name in left & found]
            names = [name for name in names if torch.equal(self._smallest[name].detach(), self._before[name])]
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
