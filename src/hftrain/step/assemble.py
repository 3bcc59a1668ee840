"""Combine a strategy and a precision into the calls of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hftrain.core.errors import StrategyError
from hftrain.core.log import get_logger
from hftrain.core.types import Owns
from hftrain.precision.base import Precision
from hftrain.step.stepper import StepCalls, Stepper, has_own_steps
from hftrain.strategies.base import Strategy

if TYPE_CHECKING:
    from hftrain.strategies.trainable_parameters import Follower

logger = get_logger(__name__)

_PARAMS = itemgetter("params")


def assemble_stepper(
    *,
    strategy: Strategy,
    precision: Precision,
    optimizer: Optimizer,
    max_grad_norm: float | None = None,
    args: Any = None,
    unclipped: Sequence[torch.Tensor] = (),
    unheld: Iterable[torch.Tensor] = (),
    computing: StepCalls | None = None,
) -> Stepper:
    """Choose the implementation of each part of a step: the precision's, or that of the strategy's own engine.

    Args:
        strategy: Launched and set up.
        precision: Opened on the strategy's device.
        optimizer: As `Strategy.setup` returned it. Its own `assemble` is used; `measure` is called before clipping;
            `update_in_backward` replaces the backward pass, see `optim/extras/in_backward.py`.
        max_grad_norm: The largest norm of all gradients together; None or 0 turns clipping off.
        args: An object whose `max_grad_norm` replaces that argument; read at each step, as a callback may change it.
        unclipped: Parameters of the optimizer to exclude from clipping and from the norm; read at each step.
        unheld: Parameters of the model that the optimizer does not hold; a callback may unfreeze them at any time.
            Their gradients are cleared after each step. They are clipped and counted with the others, unless those are
            unscaled first: nothing unscales these.
        computing: Its accelerator, if there is one, clips; read at each step.

    Raises:
        StrategyError: `Strategy.owns` names a part without its method, or a part without another that it needs.
    """
    owns = strategy.owns
    engine: Any = strategy
    args = SimpleNamespace(max_grad_norm=max_grad_norm) if args is None else args
    if has_own_steps(optimizer):
        computing = computing or StepCalls(precision.backward, precision.autocast)
        stepper: Stepper = optimizer.assemble(strategy, precision, args, computing)  # type: ignore[attr-defined]
        return stepper
    max_grad_norm, extras = args.max_grad_norm, list(unheld)
    _check_owns(strategy, scales=precision.policy.loss_scaling)
    if hasattr(optimizer, "update_in_backward") and strategy.world_size == 1:
        return _assemble_in_backward(precision, optimizer, max_grad_norm or 0.0, extras)
    unscales = precision.policy.loss_scaling and Owns.SCALING not in owns
    norm = getattr(strategy, "last_norm", None) if max_grad_norm else None  # its float() reads the last update's
    unscale, reached = (partial(precision.unscale, optimizer), []) if unscales else (None, extras)
    own_clip = partial(_clip, strategy, optimizer, args, unscale, unclipped, reached, computing)
    clip: Callable[[], Any] = (lambda: norm) if Owns.CLIP in owns else own_clip
    if hasattr(optimizer, "measure"):
        clip = partial(_measure_and_clip, clip, precision, optimizer)
    stepper = Stepper(
        autocast=nullcontext if Owns.CASTING in owns else precision.autocast,
        backward=engine.backward if Owns.BACKWARD in owns else precision.backward,
        clip=clip,
        step=engine.step if Owns.STEP in owns else partial(precision.step, optimizer),
        zero_grad=engine.zero_grad
        if Owns.STEP in owns and hasattr(engine, "zero_grad")
        else _zero_grad_of(optimizer, extras),
    )
    follower = getattr(strategy, "follower", None)
    return stepper if follower is None else _checked(stepper, follower)


def _checked(stepper: Stepper, follower: Follower) -> Stepper:
    """Return a stepper that checks that gradients were exchanged, before they are clipped or used."""

    def backward(loss: torch.Tensor, **options: Any) -> None:
        follower.has_run = True
        stepper.backward(loss, **options)

    def clip() -> torch.Tensor | None:
        follower.check_exchange()
        return stepper.clip()

    def step() -> bool:
        follower.check_exchange()
        return stepper.step()

    def zero_grad() -> None:
        stepper.zero_grad()
        follower.forget_passes()

    return replace(stepper, backward=backward, clip=clip, step=step, zero_grad=zero_grad)


def _assemble_in_backward(precision: Precision, optimizer: Any, max_norm: float, unheld: list[torch.Tensor]) -> Stepper:
    if max_norm > 0 and not optimizer.clips:
        logger.warning(
            "max_grad_norm=%s has no effect with %s: no gradient is left to clip.", max_norm, type(optimizer).__name__
        )
    return Stepper(
        autocast=precision.autocast,
        backward=partial(optimizer.update_in_backward, backward=precision.backward, max_norm=max(max_norm, 0.0)),
        clip=optimizer.last_norm,
        step=partial(precision.step, optimizer),
        zero_grad=_zero_grad_of(optimizer, unheld),
    )


def _clip(
    strategy: Strategy,
    optimizer: Optimizer,
    args: Any,
    unscale: Callable[[], None] | None,
    unclipped: Sequence[torch.Tensor],
    unheld: list[torch.Tensor],
    computing: StepCalls | None,
) -> torch.Tensor | None:
    max_norm = args.max_grad_norm
    if not max_norm or max_norm < 0:
        return None
    if unscale is not None:
        unscale()
    # Read at each step because a callback may add a parameter group.
    parameters = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
    with_grads = unheld and [parameter for parameter in unheld if parameter.grad is not None]
    if with_grads:
        ids = set(map(id, parameters))
        parameters += [parameter for parameter in with_grads if id(parameter) not in ids]
    if unclipped:
        excluded = set(map(id, unclipped))
        parameters = [parameter for parameter in parameters if id(parameter) not in excluded]
    if computing is None or computing.accelerator is None:
        return strategy.clip_grad_norm(parameters, max_norm)
    norm: torch.Tensor | None = computing.accelerator.clip_grad_norm_(parameters, max_norm)
    return norm


def _measure_and_clip(clip: Callable[[], Any], precision: Precision, optimizer: Any) -> Any:
    precision.unscale(optimizer)
    optimizer.measure()
    return clip()


def _zero_grad_of(optimizer: Optimizer, unheld: list[torch.Tensor]) -> Callable[[], None]:
    if not unheld:
        return optimizer.zero_grad  # a call less in each step

    def zero_grad() -> None:
        optimizer.zero_grad()
        for parameter in unheld:
            parameter.grad = None

    return zero_grad


def _check_owns(strategy: Strategy, *, scales: bool) -> None:
    owns = strategy.owns
    calls = Owns.BACKWARD | Owns.STEP
    reason = None
    for part, method in ((Owns.BACKWARD, "backward"), (Owns.STEP, "step")):
        if part in owns and not callable(getattr(strategy, method, None)):
            reason = f"It declares {part} and has no method {method!r}."
    if Owns.SCALING in owns and calls not in owns:
        reason = "It declares Owns.SCALING, which needs its own backward and step as well."
    elif scales and Owns.SCALING not in owns and owns & calls:
        reason = "It runs backward or step itself, and leaves the scaling of the loss to a precision it bypasses."
    if reason:
        raise StrategyError(
            f"strategy={strategy.name!r} was to take over parts of the step.",
            reason,
            "Correct the strategy's `owns`.",
            owns=owns,
        )


def note_steps(found: dict[int, weakref.ref[Optimizer]]) -> Any:
    """Note in `found` every optimizer of this process that steps, by its id, until the returned hook is removed."""

    def note(optimizer: Optimizer, *_: Any) -> None:
        found[id(optimizer)] = weakref.ref(optimizer)

    return register_optimizer_step_post_hook(note)
