"""Which strategies, precisions, devices and optimizers work together, and why the others do not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.types import Owns, PrecisionPolicy
from hftrain.optim.groups import members_of
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import strategies

Capability = tuple[int, int]

_AMPERE: Capability = (8, 0)
_DEVICES: tuple[tuple[str, Capability | None], ...] = (
    ("cpu", None),
    ("cuda", (7, 5)),
    ("cuda", _AMPERE),
    ("mps", None),
)


def check_in_backward(optimizer: Any, *, strategy: Strategy, precision: Precision, accumulation: int) -> None:
    """Raise `ConfigError` if the optimizer updates during the backward pass but the gradients are needed afterwards.

    Args:
        optimizer: An optimizer or its class.
        strategy: Launched or not.
        accumulation: Micro-steps per update.
    """
    cls: Any = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not hasattr(cls, "update_in_backward") or (cls.takes_ranks and strategy.world_size > 1):
        return
    reason = None
    if strategy.world_size > 1:
        reason = f"{strategy.world_size} processes would have to average the gradients first"
    elif accumulation > 1:
        reason = f"gradient_accumulation_steps={accumulation} would have to add them up first"
    elif precision.policy.loss_scaling:
        reason = f"precision={precision.policy.name!r} would have to unscale them first"
    elif Owns.BACKWARD in strategy.owns:
        reason = f"strategy={strategy.name!r} runs the backward pass itself"
    if reason:
        raise ConfigError(
            f"Cannot use {cls.__name__}, which updates as soon as it has a gradient.",
            f"It cannot: {reason}.",
            "Use one process, gradient_accumulation_steps=1 and no fp16, or an optimizer that steps afterwards.",
        )


def check_per_sample(optimizer: Any, strategy: Strategy, precision: Precision, *, accumulation: int | None) -> None:
    """Raise `ConfigError` if the loss is multiplied before an optimizer of Opacus clips the gradients of its samples.

    Args:
        strategy: After its launch.
        accumulation: By how many micro-batches a loss is divided; None checks nothing.
    """
    private = next((each for each in members_of(optimizer) if hasattr(each, "signal_skip_step")), None)
    if private is None or accumulation is None:
        return
    reason = remedy = None
    if accumulation > 1:
        reason = f"the loss of a micro-batch is divided by gradient_accumulation_steps={accumulation}"
        remedy = (
            "Set loss_is_scaled_for_ga = True in the Trainer's class, with a plain model and without count_items: the "
            "optimizer divides the gradients."
        )
    elif strategy.world_size > 1:
        reason, remedy = f"{strategy.world_size} processes weigh the loss", "Train on one process."
    elif precision.policy.loss_scaling:
        reason, remedy = f"precision={precision.policy.name!r} scales the loss", "Use precision='bf16' or '32'."
    if reason:
        raise ConfigError(
            f"Cannot use {type(private).__name__}, which clips the gradient of each sample, as it is:",
            f"{reason} before it clips.",
            f"{remedy} Or override training_step with one that calls loss.backward() itself.",
        )


def check_several(optimizer: Any, strategy: Strategy) -> None:
    """Raise if the strategy's engine steps one optimizer, and there are several."""
    if hasattr(optimizer, "members") and strategy.owns & (Owns.STEP | Owns.BACKWARD):
        raise StrategyError(
            f"Cannot use the optimizers {', '.join(optimizer.members)} with strategy={strategy.name!r}:",
            "its engine steps one optimizer.",
            "Return one optimizer with several groups from configure_optimizers(), or use 'ddp' or 'fsdp'.",
        )


class LegalityRow(NamedTuple):
    """One line of the legality table; `reason` is None if the pair works."""

    strategy: str
    precision: str
    device: str
    reason: str | None


def check_legal(strategy: Strategy, precision: Precision) -> None:
    """Raise `ConfigError` unless a strategy and a precision work together on the device that the strategy will use.

    Call before `Strategy.launch`: allocates nothing on a device, though torch queries the driver about a GPU.
    """
    strategy.check_processes()
    policy, kind = precision.policy, strategy.device_type
    capability = torch.cuda.get_device_capability(strategy.planned_device) if kind == "cuda" else None
    reason = strategy.refuses(policy, kind) or find_device_refusal(policy, kind, capability)
    if reason:
        raise ConfigError(
            f"Cannot use precision={policy.name!r} with strategy={strategy.name!r} on {kind!r}.",
            f"{reason}.",
            "Choose another precision, strategy or device.",
        )
    precision.check_available()


def find_device_refusal(policy: PrecisionPolicy, device_type: str, capability: Capability | None) -> str | None:
    """Return why a kind of device cannot run a precision, None if it can.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"mps"``, ...
        capability: The compute capability of a CUDA device; None for other devices.
    """
    if policy.matmul == "high" and device_type != "cuda":
        return "TF32 exists on CUDA devices only"
    if policy.compute_dtype == torch.float64 and device_type == "mps":
        return "MPS has no float64"
    if capability is not None and capability < _AMPERE:
        gpu = f"and this one has {capability[0]}.{capability[1]}"
        if policy.matmul == "high":
            return f"TF32 needs a GPU of compute capability 8.0 or newer, {gpu}"
        if policy.compute_dtype == torch.bfloat16:
            return f"bfloat16 needs a GPU of compute capability 8.0 or newer, {gpu}; 'fp16' works"
    return None


def legality_table() -> list[LegalityRow]:
    """List every registered strategy with every registered precision on each kind of device, for the documentation."""
    return [
        LegalityRow(strategy, precision, _label(kind, capability), reason)
        for strategy in strategies.usable_names()
        for precision in precisions.usable_names()
        for kind, capability in _DEVICES
        for reason in [_find_refusal(strategy, precisions.create(precision).policy, kind, capability)]
    ]


def _find_refusal(strategy: str, policy: PrecisionPolicy, kind: str, capability: Capability | None) -> str | None:
    factory, _ = strategies.resolve(strategy)
    # A class attribute, so that a strategy whose package is not installed is listed too.
    refuses = factory.refuses if isinstance(factory, type) and issubclass(factory, Strategy) else Strategy.refuses
    return refuses(policy, kind) or find_device_refusal(policy, kind, capability)


def _label(kind: str, capability: Capability | None) -> str:
    return kind if capability is None else f"{kind} {capability[0]}.{capability[1]}"


def check_gradients_at_hand(callback: Any, optimizer: Any, strategy: Any) -> None:
    """Raise unless a callback can change the gradients of a step between backward pass and update.

    Raises:
        ConfigError: The optimizer updates during the backward pass, or the task steps it by hand.
        StrategyError: The strategy's engine updates itself.
    """
    name = type(callback).__name__
    if strategy.owns & (Owns.BACKWARD | Owns.STEP | Owns.CLIP):
        raise StrategyError(
            f"Cannot use {name} with strategy={strategy.name!r}.",
            "Its engine averages, unscales and applies the gradients itself.",
            "Use what the engine's configuration offers, or another strategy.",
        )
    is_by_hand = hasattr(optimizer, "update_scale")
    if is_by_hand or hasattr(optimizer, "update_in_backward"):
        raise ConfigError(
            f"Cannot use {name} with {type(optimizer).__name__}.",
            "The task steps its optimizers by hand." if is_by_hand else "It updates during the backward pass.",
            "Do it in training_step." if is_by_hand else "Use an optimizer that steps after the backward pass.",
        )
