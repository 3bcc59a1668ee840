"""Evaluation of sharded models: every rank must run as many forward passes as the rank with the most batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hftrain.core.errors import StrategyError
from hftrain.core.preserve import temporarily
from hftrain.core.tree import map_tensors, tensors_of
from hftrain.strategies.base import Strategy
from hftrain.strategies.distributed import DistributedStrategy

_CALLING, _DONE, _EMPTY = 2, 1, 0


class Lockstep:
    """Track a model's forward passes and repeat the last one while other ranks still run some.

    A forward pass gathers parameters from all ranks, which may have different numbers of batches. Before each pass the
    ranks exchange which of them run one, which synchronises. A rank without batches left repeats the arguments of its
    last pass, or of another rank's if it had none, and discards the output: neither the task nor its metrics see it.

    Args:
        casting: Returns the context in which a forward pass is repeated.
    """

    def __init__(
        self, model: nn.Module, strategy: Strategy, casting: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._casting = casting
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._is_repeating = False
        hook = self._before_forward
        if "torch._dynamo" in sys.modules:
            # Otherwise the compiler, if any, rewrites the collective into a form that ranks in eager mode do not run.
            hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        self._handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def finish(self) -> None:
        """Take part in the remaining forward passes of other ranks. Collective."""
        while _CALLING in self._tell(_EMPTY if self._call is None else _DONE):
            assert self._call is not None
            args, kwargs = self._call
            with temporarily(self, _is_repeating=True), torch.no_grad(), self._casting():
                self._model(*args, **kwargs)

    def close(self) -> None:
        """Stop tracking."""
        self._handle.remove()
        self._call = None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_repeating:
            self._call = (args, kwargs)
            self._tell(_CALLING)

    def _tell(self, status: int) -> list[int]:
        """Exchange which ranks will run a forward pass; send arguments to ranks that have not run any."""
        message = torch.tensor([status], device=self._strategy.device)
        messages = [torch.empty_like(message) for _ in range(self._strategy.world_size)]
        dist.all_gather(messages, message)
        statuses: list[int] = torch.cat(messages).tolist()
        if _CALLING in statuses and _EMPTY in statuses:
            call = broadcast_tree(self._strategy, self._call, src=statuses.index(_CALLING))
            if self._call is None:
                self._call = call
        return statuses


def broadcast_tree(strategy: Strategy, tree: Any, *, src: int) -> Any:
    """Return the arguments of rank `src`: tensors on the device in nested tuples, lists and mappings. Collective.

    Raises:
        StrategyError: They hold another type; raised on rank `src` alone.
    """
    description = strategy.broadcast_object(described(tree, _refused) if strategy.rank == src else None, src)
    if strategy.rank != src:
        tree = map_tensors(restored(description), lambda like: empty(like, strategy.device))
    for tensor in tensors_of(tree):
        # As bytes: backends do not support every dtype.
        dist.broadcast(tensor.detach().contiguous().reshape(-1).view(torch.uint8), src)
    return tree


def _refused(leaf: Any) -> NoReturn:
    raise StrategyError(
        "Cannot evaluate a sharded model on fewer batches than there are processes.",
        f"The others must run the model too, and its arguments hold a {type(leaf).__name__}, which cannot be sent.",
        "Evaluate on more samples, or pass the model tensors, numbers and text.",
    )


def described(tree: Any, other: Callable[[Any], Any] = lambda leaf: None) -> Any:
    """Return nested values as JSON: tensors by dtype and shape, and what `other` returns for what is not plain."""
    if isinstance(tree, torch.Tensor):
        return ["tensor", str(tree.dtype).removeprefix("torch."), list(tree.shape), tree.requires_grad]
    if isinstance(tree, Mapping):
        return ["mapping", [[key, described(value, other)] for key, value in tree.items()]]  # keys may be numbers
    if isinstance(tree, (list, tuple)):
        return ["tuple" if isinstance(tree, tuple) else "list", [described(value, other) for value in tree]]
    return ["plain", tree if isinstance(tree, (type(None), bool, int, float, str)) else other(tree)]


def restored(form: Any, kind: Any = dict) -> Any:
    """Return what was described, with tensors on the meta device."""
    kind_name, value, *details = form
    if kind_name == "tensor":
        return torch.empty(details[0], dtype=getattr(torch, value), device="meta", requires_grad=details[1])
    if kind_name == "mapping":
        return kind({key: restored(each) for key, each in value})
    if kind_name in ("list", "tuple"):
        return (tuple if kind_name == "tuple" else list)(map(restored, value))
    return value


def empty(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor of the same shape and dtype, contiguous and without content."""
    return torch.empty(like.shape, dtype=like.dtype, device=device or like.device)


class SplittingStrategy(DistributedStrategy):
    """Evaluate a sharded model on all ranks in lockstep; subclasses start it in `for_evaluation`."""

    _lockstep: Lockstep | None = None

    def finish_forwards(self) -> None:
        if self._lockstep is not None:
            self._lockstep.finish()

    def after_evaluation(self, model: nn.Module) -> None:
        if self._lockstep is not None:
            self._lockstep.close()
            self._lockstep = None

    def _start_lockstep(
        self, model: nn.Module, casting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        if self.world_size > 1:
            SplittingStrategy.after_evaluation(self, model)
            self._lockstep = Lockstep(model, self, casting)
