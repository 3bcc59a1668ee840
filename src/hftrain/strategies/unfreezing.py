"""Parameters that are frozen, unfrozen or added after an engine was created for the trainable ones."""

from __future__ import annotations

import json
import time
import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from hftrain.core.errors import StrategyError

if TYPE_CHECKING:
    from hftrain.strategies.distributed import DistributedStrategy

requires_grad = attrgetter("requires_grad")
_FOLLOWER = "_hftrain_follower"
_POLL_S = 0.02
_WITHIN_UPDATE = (1 << 20) - 1


def follow_parameters(wrapped: DistributedDataParallel, strategy: DistributedStrategy) -> None:
    """Keep a DDP wrapper averaging the gradients of all parameters that require one. Collective.

    DDP averages only the gradients of parameters that required one when it was created; replicas would diverge in the
    others. Each forward pass that records gradients therefore first compares the `requires_grad` flags, which takes
    about 40 nanoseconds per parameter. All ranks must change the same ones; an error names a rank that does not.
    """
    follow(wrapped, strategy, _Averaged)


def follow(outermost: nn.Module, strategy: DistributedStrategy, kind: type[Follower]) -> None:
    """Attach one `Follower` of class `kind` to a model, or reuse it, for this run. Collective."""
    follower = vars(outermost).get(_FOLLOWER)
    if follower is None:
        follower = kind(outermost)
        setattr(outermost, _FOLLOWER, follower)
        outermost.register_forward_pre_hook(follower, prepend=True)
    follower.join(strategy)


class FixedParameters:
    """The trainable parameters of a model, for an engine that does not support changing them.

    Args:
        model: The model.
        engine: The engine's name for the error.
    """

    def __init__(self, model: nn.Module, *, engine: str) -> None:
        self._engine = engine
        self._model = model
        self._names, self._parameters = map(list, zip(*model.named_parameters(), strict=True))
        self._flags = list(map(requires_grad, self._parameters))
        self._is_stale = _mark_additions(self, set(map(id, self._parameters)))

    def check(self) -> None:
        """Raise `StrategyError` if the set of trainable parameters has changed."""
        found = list(map(requires_grad, self._parameters))
        if found != self._flags:
            names = [name for name, now, before in zip(self._names, found, self._flags, strict=True) if now != before]
            raise StrategyError(
                f"Cannot freeze or unfreeze {names[0]!r} while the training runs.",
                f"{self._engine} fixes the trained parameters when a run starts.",
                "Do it before train(), or end the run and resume it with the others frozen.",
                changed=names,
            )
        if self._is_stale[0]:
            self._is_stale[0] = False
            known = set(map(id, self._parameters))
            refuse_added([n for n, p in self._model.named_parameters() if id(p) not in known and p.requires_grad])


class _Agreement:
    """Check that all ranks change the same parameters before the same forward pass.

    Steps without a change have no overhead. A rank with a change posts a note and waits for the others' notes; on a
    rank that has continued without a change, the watch's thread answers.

    Args:
        strategy: A launched strategy with a watch.
        passes: A one-element list with this rank's position, which increases with each forward pass on every rank.
    """

    def __init__(self, strategy: DistributedStrategy, passes: list[int]) -> None:
        assert strategy.watch is not None
        self.watch = strategy.watch
        self._board = strategy.make_board()
        self._rank, self._world_size = strategy.rank, strategy.world_size
        self._timeout_s = strategy.timeout.total_seconds()
        self._passes = passes
        self._changed_at = self._answered = -1
        self.watch.chore = self._answer

    def check(self, change: list[str]) -> None:
        """Wait for the other ranks' changes. Collective among the ranks that change parameters.

        Raises:
            StrategyError: Another rank changes other parameters, or none.
        """
        at = self._changed_at = self._passes[0]
        self._post(at, change)
        self._board.post("change", str(at))
        deadline = time.monotonic() + self._timeout_s
        while True:
            told = {rank: self._told(rank, at) for rank in range(self._world_size)}
            if all(names == change for names in told.values()):
                return
            if any(names not in (None, change) for names in told.values()) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        others = "; ".join(f"rank {rank}: {_listed(names)}" for rank, names in told.items() if names != change)
        raise StrategyError(
            "Cannot change which parameters are trained on some ranks only.",
            f"Rank {self._rank}: {_listed(change)}; {others}.",
            "Freeze, unfreeze or add the same parameters on every rank, in the same step.",
        )

    def _told(self, rank: int, at: int) -> list[str] | None:
        note = json.loads(self._board.read(f"rank {rank}") or "[-1, []]")
        return note[1] if note[0] == at else None

    def _post(self, at: int, change: list[str]) -> None:
        self._board.post(f"rank {self._rank}", json.dumps([at, change]))

    def _answer(self) -> None:
        """Post that this rank has continued without a change; called by the watch's thread."""
        at = int(self._board.read("change") or -1)
        if self._passes[0] > at and at not in (-1, self._changed_at, self._answered):
            self._answered = at
            self._post(at, [])


class Follower:
    """Detect, before a forward pass that records gradients, which parameters start or stop requiring one.

    Args:
        outermost: The outermost module; this object becomes its forward pre-hook.
    """

    def __init__(self, outermost: nn.Module) -> None:
        self._passes = [0]
        self._agreement: _Agreement | None = None
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._known: set[int] = set()
        self._note(outermost)
        self._is_stale = _mark_additions(self, self._known)

    def __call__(self, outermost: Any, inputs: Any) -> None:
        raise NotImplementedError

    def join(self, strategy: DistributedStrategy) -> None:
        """Check changes against the other ranks from now on, if there are any. Collective."""
        if strategy.watch is not None and (self._agreement is None or self._agreement.watch is not strategy.watch):
            self._agreement = _Agreement(strategy, self._passes)

    def _note(self, outermost: nn.Module) -> None:
        """Record the current parameters and which of them require a gradient."""
        named = self._named(outermost)
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._flags = list(map(requires_grad, self._parameters))
        self._known.clear()
        self._known.update(map(id, self._parameters))

    def _look(self, outermost: Any) -> None:
        """Act if the set of trainable parameters has changed. Collective if so."""
        self._is_stale[0] = False
        # Keep references, so that a new parameter cannot reuse the id of a freed one.
        held, before = self._parameters, self._trained()
        self._note(outermost)
        now = self._trained()
        begun = [p for p in self._parameters if id(p) in now.keys() - before.keys()]
        change = [f"trains {now[id(p)]!r}" for p in begun]
        change += [f"freezes {before[id(p)]!r}" for p in held if id(p) in before.keys() - now.keys()]
        if change:
            self._check(outermost, begun)
            if self._agreement is not None:
                self._agreement.check(change)
            self._act(outermost, begun)

    def _trained(self) -> dict[int, str]:
        found = zip(self._names, self._parameters, self._flags, strict=True)
        return {id(parameter): name for name, parameter, is_trained in found if is_trained}

    def _named(self, outermost: Any) -> list[tuple[str, nn.Parameter]]:
        raise NotImplementedError

    def _check(self, outermost: Any, begun: list[nn.Parameter]) -> None:
        """Raise if the engine does not support the change."""

    def _act(self, outermost: Any, begun: list[nn.Parameter]) -> None:
        """Apply the change to the engine. Collective."""


class _Averaged(Follower):
    """The parameters for which DDP's reducer was created."""

    def __call__(self, outermost: Any, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._is_stale[0] or list(map(requires_grad, self._parameters)) != self._flags:
            self._look(outermost)
        # Ranks may run unequal numbers of passes before a synchronising one, from which they count in step again.
        before = self._passes[0]
        self._passes[0] = (before | _WITHIN_UPDATE if outermost.require_backward_grad_sync else before) + 1

    def _named(self, outermost: Any) -> list[tuple[str, nn.Parameter]]:
        return list(outermost.module.named_parameters())

    def _act(self, outermost: Any, begun: list[nn.Parameter]) -> None:
        for parameter in begun:
            torch.distributed.broadcast(parameter.detach(), src=0, group=outermost.process_group)
        # As unpickling does: create a reducer for the trainable parameters and keep everything else.
        outermost.__setstate__(outermost.__getstate__())
        for hook, state in outermost._comm_hooks:
            torch.distributed._register_comm_hook(outermost.reducer, state, hook)  # type: ignore[attr-defined]


# The hooks of `_mark_additions`, each with its owner. They are removed when the next ones are added, not when the owner
# is freed, because that may happen while torch iterates over its hooks.
_HOOKS: list[tuple[weakref.ref[Any], Any]] = []


def _mark_additions(owner: object, known: set[int]) -> list[bool]:
    """Return a one-element list that becomes True when any module gets an unknown parameter or module.

    It is updated as long as `owner` is alive.
    """
    mark = [False]

    def note(module: nn.Module, name: str, new: Any) -> None:
        # Engines remove parameters and register them again.
        if id(new) not in known:
            mark[0] = True

    for gone in [entry for entry in _HOOKS if entry[0]() is None]:
        gone[1].remove()
        _HOOKS.remove(gone)
    for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
        # `note` refers only to the mark and the ids, so that the model can be freed.
        _HOOKS.append((weakref.ref(owner), register(note)))
    return mark


def refuse_added(names: list[str]) -> None:
    """Raise `StrategyError` if there are names of added trainable parameters."""
    if names:
        raise StrategyError(
            f"Cannot add {names[0]!r} to a model that is split while the training runs.",
            "The model was split when the run began; parameters added later are neither split nor averaged.",
            "Add them before train(), or end the run, add them and start a new one; strategy='ddp' supports it.",
            added=names,
        )


def _listed(names: list[str] | None) -> str:
    if names is None:
        return "no answer"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "no change"
