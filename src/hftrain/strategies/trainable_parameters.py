"""Parameters that are frozen, unfrozen or added after an engine was created for the trainable ones."""

from __future__ import annotations

import weakref
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hftrain.core.errors import StrategyError
from hftrain.core.state import Counter
from hftrain.core.tree import tensors_of
from hftrain.strategies.base import Strategy
from hftrain.strategies.watch import Agreement

_REQUIRES_GRAD = attrgetter("requires_grad")
_FOLLOWER = "_hftrain_follower"
_WITHIN_UPDATE = (1 << 20) - 1


class Trained:
    """The trainable parameters of a model when it was last looked at; a comparison takes about 40 ns per parameter."""

    _names: tuple[str, ...] = ()
    _parameters: tuple[nn.Parameter, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self._remember(self._named_parameters(model))
        self._initial_ids = self._known_ids
        _watch_additions()
        _WATCHING.add(self)

    def note_addition(self, new: Any) -> None:
        """Look at the whole model next time if a module or parameter is new; engines register known ones again."""
        self._is_stale |= id(new) not in self._known_ids

    def _follow(self, model: nn.Module) -> None:
        if not self._is_stale and list(map(_REQUIRES_GRAD, self._parameters)) == self._flags:
            return
        parameters = self._named_parameters(model)
        # The earlier ones are kept until the end, so that a new parameter cannot have the id of a freed one.
        rows = zip(self._names, self._parameters, self._flags, strict=True)
        old_names = {id(p): name for name, p, is_trained in rows if is_trained}
        ids = {id(p) for _, p in parameters if p.requires_grad}
        additions = {name: p for name, p in parameters if p.requires_grad and id(p) not in old_names}
        removals = [name for key, name in old_names.items() if key not in ids]
        if additions or removals:
            self._apply_changes(model, additions, removals)
        self._remember(parameters)

    def _remember(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        self._names, self._parameters = tuple(name for name, _ in parameters), tuple(p for _, p in parameters)
        self._flags = list(map(_REQUIRES_GRAD, self._parameters))
        self._known_ids = frozenset(map(id, self._parameters))
        self._is_stale = False

    def _named_parameters(self, model: Any) -> list[tuple[str, nn.Parameter]]:
        return list(model.named_parameters())

    def _apply_changes(self, model: Any, additions: dict[str, nn.Parameter], removals: list[str]) -> None:
        """Apply the change to the engine, or raise; called before the change is noted."""
        raise NotImplementedError

    def _refuse_added(self, additions: dict[str, nn.Parameter]) -> None:
        """Raise `StrategyError` if one of these was not in the model at first."""
        names = [name for name, parameter in additions.items() if id(parameter) not in self._initial_ids]
        if names:
            raise StrategyError(
                f"Cannot add {names[0]!r} to a model that is split while the training runs.",
                "The model was split when the run began; parameters added later are neither split nor averaged.",
                "Add them before train(), or end the run, add them and start a new one; strategy='ddp' supports it.",
                added=names,
            )


# torch's hooks stay for the process: removing one while torch iterates over them, as when a model is freed, would fail.
_WATCHING: weakref.WeakSet[Trained] = weakref.WeakSet()


@cache
def _watch_additions() -> None:
    for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
        register(_note_addition)


def _note_addition(module: nn.Module, name: str, new: Any) -> None:
    for each in list(_WATCHING):
        each.note_addition(new)


class FixedParameters(Trained):
    """The trainable parameters of a model, for an engine that does not support changing them.

    Args:
        engine: The engine's name for the error.
    """

    def __init__(self, model: nn.Module, *, engine: str) -> None:
        super().__init__(model)
        self._model, self._engine = model, engine

    def check(self) -> None:
        """Raise `StrategyError` if the set of trainable parameters has changed."""
        self._follow(self._model)

    def _apply_changes(self, model: Any, additions: dict[str, nn.Parameter], removals: list[str]) -> None:
        self._refuse_added(additions)
        names = [*additions, *removals]
        raise StrategyError(
            f"Cannot freeze or unfreeze {names[0]!r} while the training runs.",
            f"{self._engine} fixes the trained parameters when a run starts.",
            "Do it before train(), or end the run and resume it with the others frozen.",
            changed=names,
        )


class Follower(Trained):
    """Let an engine train what requires a gradient, looked at before each forward pass that records gradients.

    All ranks must change the same parameters; an error names a rank that does not. A step whose gradients were not
    exchanged is an error, too: each process would train a model of its own, or wait for one that exchanges nothing.

    Attributes:
        has_run: Whether a backward pass has run since `forget_passes`.
    """

    # The attribute of the outermost module that is False in passes which exchange no gradients.
    syncs = ""
    # Whether the outermost module is a wrapper, whose inner module exchanges nothing when it is called.
    wraps = False

    def __init__(self, outermost: nn.Module) -> None:
        super().__init__(outermost)
        self.forget_passes()
        # It counts passes. Ranks may run unequal numbers of them before a synchronising one, from which they count in
        # step again.
        self._passes = Counter()
        self._agreement: Agreement | None = None

    @classmethod
    def attach(cls, outermost: Any, strategy: Strategy) -> Follower:
        """Follow the parameters of a wrapped model, for the next run of `strategy`. Collective."""
        follower: Follower | None = vars(outermost).get(_FOLLOWER)
        if follower is None:
            follower = cls(outermost)
            setattr(outermost, _FOLLOWER, follower)
            outermost.register_forward_pre_hook(follower, prepend=True)
            (outermost.module if cls.wraps else outermost).register_forward_hook(follower.watch)
        agreement = follower._agreement
        if strategy.watch is not None and (agreement is None or agreement.watch is not strategy.watch):
            follower._agreement = strategy.watch.agreement(
                follower._passes,
                problem="Cannot change which parameters are trained on some ranks only.",
                remedy="Freeze, unfreeze or add the same parameters on every rank, in the same step.",
            )
        return follower

    def __call__(self, outermost: Any, inputs: Any) -> None:
        # Compiled code must not contain this check.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._follow(outermost)
            self._is_called = True
            passes = self._passes.value
            self._passes.value = (passes | _WITHIN_UPDATE if vars(outermost).get(self.syncs, True) else passes) + 1

    def forget_passes(self) -> None:
        """Forget the passes of an earlier step, or those that exchange nothing."""
        self._is_called = self.has_run = False
        self._is_reached: bool | None = None

    def watch(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Notice when a backward pass reaches what the model returned; a forward hook."""
        if not self._is_called or self._is_reached or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        # Outputs that cannot be looked into may be used, and a leaf is no result of the parameters.
        tensors = [tensor for tensor in tensors_of(outputs) if tensor.grad_fn is not None]
        self._is_reached = not tensors
        for tensor in tensors:
            tensor.register_hook(self._reach)  # type: ignore[no-untyped-call]

    def _reach(self, gradient: torch.Tensor) -> None:
        self._is_reached = True

    def check_exchange(self) -> None:
        """Raise `StrategyError` if the gradients of the step's last micro-batch were not exchanged."""
        is_left_out = self.wraps and not self._is_called
        if self._is_reached is not False and not is_left_out:
            return
        if not self.has_run and all(parameter.grad is None for parameter in self._parameters):
            return  # a step without a backward pass trains nothing
        reason = "its last loss does not depend on what the model returned, and the other processes wait for gradients."
        remedy = "Compute the loss from the model's outputs; multiply it by 0 for a batch that is not to count."
        if is_left_out:
            reason = "the loss was computed without a call of the wrapped model: each process would train its own copy."
            remedy = (
                "Call the model that compute_loss or training_step is given (in a TaskModule self.model, elsewhere "
                "trainer.model_wrapped), and neither trainer.model nor model.module."
            )
        raise StrategyError("Cannot average the gradients of a step over the processes:", reason, remedy)

    def _apply_changes(self, model: Any, additions: dict[str, nn.Parameter], removals: list[str]) -> None:
        if self._agreement is not None:
            changes = [f"trains {name!r}" for name in additions] + [f"freezes {name!r}" for name in removals]
            self._agreement.check(changes)


class AveragedParameters(Follower):
    """The parameters for which DDP's reducer was created; it would not average the gradients of others."""

    syncs = "require_backward_grad_sync"
    wraps = True

    def _named_parameters(self, model: Any) -> list[tuple[str, nn.Parameter]]:
        return list(model.module.named_parameters())

    def _apply_changes(self, model: Any, additions: dict[str, nn.Parameter], removals: list[str]) -> None:
        super()._apply_changes(model, additions, removals)
        for parameter in additions.values():
            torch.distributed.broadcast(parameter.detach(), src=0, group=model.process_group)
        # As unpickling does: create a reducer for the trainable parameters and keep everything else.
        model.__setstate__(model.__getstate__())
        for hook, state in model._comm_hooks:
            torch.distributed._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]
