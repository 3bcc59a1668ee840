"""Evaluation of a model that is split: every process must run as many forward passes as the one with the most data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from hftrain.core.errors import StrategyError
from hftrain.strategies.base import Strategy
from hftrain.strategies.distributed import DistributedStrategy

_CALLING, _DONE, _EMPTY = 2, 1, 0


class Lockstep:
    """Watch a model's forward passes, and repeat the last one for as long as another process still runs some.

    A forward pass gathers parameters from all processes, and they hold different numbers of batches. Before each pass
    they tell each other who runs one, which synchronises. The one that has run out repeats the arguments of its own
    last pass, or of somebody else's if it had none, and drops the answer: neither a task nor its metrics see it.

    Args:
        model: The outermost unit.
        casting: Gives the context to repeat a forward pass in.
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
        if model._compiled_call_impl is not None:
            # Else the compiler writes the exchange again, in a form that a rank which runs the model as written lacks.
            hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        self._handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def finish(self) -> None:
        """Take part in the passes that other processes still run; collective."""
        while _CALLING in self._tell(_EMPTY if self._call is None else _DONE):
            assert self._call is not None
            args, kwargs = self._call
            self._is_repeating = True
            try:
                with torch.no_grad(), self._casting():
                    self._model(*args, **kwargs)
            finally:
                self._is_repeating = False

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()
        self._call = None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_repeating:
            self._call = (args, kwargs)
            self._tell(_CALLING)

    def _tell(self, status: int) -> list[int]:
        """Exchange who is about to run a forward pass, and lend arguments to those who have never seen any."""
        mine = torch.tensor([status], device=self._strategy.device)
        all_of_them = [torch.empty_like(mine) for _ in range(self._strategy.world_size)]
        dist.all_gather(all_of_them, mine)
        statuses: list[int] = torch.cat(all_of_them).tolist()
        if _CALLING in statuses and _EMPTY in statuses:
            lent = lend(self._strategy, self._call, src=statuses.index(_CALLING))
            if self._call is None:
                self._call = lent
        return statuses


def lend(strategy: Strategy, tree: Any, *, src: int) -> Any:
    """Return what process `src` holds: tensors on the device, in nested tuples, lists and mappings. Collective.

    Raises:
        StrategyError: It holds something else, in process `src` alone; see `can_lend`.
    """
    leaves: list[Any] = []
    form: Any = None
    if strategy.rank == src:
        leaves, spec = tree_flatten(_plain(tree))
        form = treespec_dumps(spec), [_kind(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    spec_text, kinds = strategy.broadcast_object(form, src)
    if strategy.rank != src:
        leaves = [_empty(kind, strategy.device) if isinstance(kind, list) else kind for kind in kinds]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            # As bytes: backends do not take every type.
            dist.broadcast(leaf.detach().contiguous().reshape(-1).view(torch.uint8), src)
    return tree if strategy.rank == src else tree_unflatten(leaves, treespec_loads(spec_text))


def _kind(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _empty(kind: list[Any], device: torch.device) -> torch.Tensor:
    return torch.empty(kind[1], dtype=getattr(torch, kind[0]), device=device)


def can_lend(tree: Any) -> bool:
    """Tell whether `lend` can send this."""
    try:
        _plain(tree)
    except StrategyError:
        return False
    return True


def _plain(tree: Any) -> Any:
    """Return nested arguments in dicts, lists and tuples alone."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return (tuple if isinstance(tree, tuple) else list)(map(_plain, tree))
    if tree is None or isinstance(tree, (torch.Tensor, bool, int, float, str)):
        return tree
    raise StrategyError(
        "Cannot evaluate a sharded model on fewer batches than there are processes.",
        f"The others must run the model too, and its arguments hold a {type(tree).__name__}, which cannot be sent.",
        "Evaluate on more samples, or pass the model tensors, numbers and text.",
    )


class SplittingStrategy(DistributedStrategy):
    """Let processes that hold parts of a model evaluate it together. A subclass says, in `for_evaluation`, which."""

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
        """Watch the forward passes of a model, if other processes take part in them."""
        if self.world_size > 1:
            SplittingStrategy.after_evaluation(self, model)
            self._lockstep = Lockstep(model, self, casting)
