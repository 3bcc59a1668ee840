"""A real `accelerate.Accelerator` for scripts and subclasses, with the run's `backward`; the loops do not use it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hftrain.adapter.data import read_accelerator_config
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError, StrategyError, TaskError
from hftrain.core.launcher import accelerate_state, tell_accelerate_sync
from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns
from hftrain.precision.base import Precision
from hftrain.step.stepper import StepCalls
from hftrain.strategies.base import Strategy, has_engine

_PLUGINS = frozenset({"deepspeed_plugin"})
# Keywords that the documented training_step passes to backward; the run's own backward needs neither.
_ENGINE_KEYWORDS = frozenset({"learning_rate", "scale_wrt_gas"})

_LOADER_SETTINGS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")


def make_accelerator(args: TrainingArguments, strategy: Strategy, precision: Precision, computing: StepCalls) -> Any:
    """Return an `Accelerator` that agrees with the strategy and the precision; launches the strategy. Collective.

    Creating it converts and wraps nothing. Its `gather` takes tensors with different numbers of rows. Its state is not
    shared: the accelerator of a second Trainer with another precision does not change it.

    Raises:
        StrategyError: accelerate was set up before, for other processes or another device than the strategy's.
    """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import GradientAccumulationPlugin

    strategy.launch()
    mixed, loader_settings = _settings(args, precision.policy, device_type=strategy.device_type)
    options = strategy.accelerator_options()
    # Set afterwards: passed as an argument, it would be dropped on a CPU and leave an environment variable set.
    fsdp_plugin = options.pop("fsdp_plugin", None)
    earlier = accelerate_state("AcceleratorState")
    if earlier and (earlier.get("_mixed_precision") != mixed or options.keys() & _PLUGINS or _has_engine(earlier)):
        # A singleton that would keep the settings of an earlier Trainer.
        earlier.clear()
    process = accelerate_state("PartialState")
    is_alone = strategy.world_size == 1
    if process and is_alone and torch.device(process.get("device", "cpu")).type != strategy.device_type:
        earlier.clear()
        process.clear()
    accelerator: Any = Accelerator(
        mixed_precision=mixed,
        # The Trainer accumulates, so `backward` must not divide: as documented, a training_step divides its loss.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(**loader_settings),
        **options,
    )
    for state in (accelerator.state, accelerator.gradient_state):
        state.__dict__ = dict(vars(state))  # no longer shared from here on
    if fsdp_plugin is not None:
        accelerator.state.fsdp_plugin = fsdp_plugin
    _check(accelerator, strategy)
    _use_run_calls(accelerator, strategy, precision, computing)
    return accelerator


def adopt_accelerator(
    accelerator: Any, args: TrainingArguments, strategy: Strategy, precision: Precision, computing: StepCalls
) -> Any:
    """Return the user's `Accelerator` after setting its `backward`, `gather` and `sync_gradients` to the run's.

    Strategy and precision do not change. Its `backward` still divides the loss by its own
    `gradient_accumulation_steps`.

    Raises:
        ConfigError: It is not an `Accelerator`, or it uses another engine than the strategy.
        StrategyError: It describes other processes or another device than the strategy's.
    """
    from accelerate import Accelerator

    reason = None
    if not isinstance(accelerator, Accelerator):
        reason = f"A {type(accelerator).__name__} is not an accelerate.Accelerator."
    elif _has_engine(vars(accelerator.state)) and not any(has_engine(strategy, name) for name in ("deepspeed", "fsdp")):
        reason = f"It has its own engine, and strategy={strategy.name!r} runs the training."
    elif type(accelerator).backward is not Accelerator.backward:
        reason = f"{type(accelerator).__name__}.backward would not be called; override training_step instead."
    if reason is not None:
        raise ConfigError("trainer.accelerator was assigned.", reason, "Pass strategy= and precision= to the Trainer.")
    _check(accelerator, strategy)
    mixed, _ = _settings(args, precision.policy, device_type=strategy.device_type)
    if accelerator.mixed_precision != mixed:
        warn_once(
            f"The assigned Accelerator has mixed_precision={accelerator.mixed_precision!r}. The training still "
            f"runs with precision={precision.policy.name!r}: pass precision= to change it."
        )
    _use_run_calls(accelerator, strategy, precision, computing)
    return accelerator


def _use_run_calls(accelerator: Any, strategy: Strategy, precision: Precision, computing: StepCalls) -> None:
    from accelerate import Accelerator

    accelerator.backward = computing.own_backward = partial(_backward, computing, accelerator)
    accelerator.unscale_gradients = partial(_unscale, strategy, precision, computing, accelerator)
    if type(accelerator).clip_grad_norm_ is Accelerator.clip_grad_norm_:  # otherwise a subclass has its own
        accelerator.clip_grad_norm_ = partial(_clip_norm, strategy, computing, accelerator)
    if strategy.world_size > 1:
        # accelerate's `gather` assumes equally many rows on each process, but evaluation batches differ.
        accelerator.gather = lambda tensor: map_tensors(tensor, strategy.data.gather)
    tell_accelerate_sync(accelerator, computing.syncs)


def _backward(computing: StepCalls, accelerator: Any, loss: torch.Tensor, **options: Any) -> None:
    if computing.optimizer is None:
        type(accelerator).backward(accelerator, loss, **options)
        return
    if accelerator.gradient_accumulation_steps > 1:
        loss = loss / accelerator.gradient_accumulation_steps
    computing.backward(loss, **{name: value for name, value in options.items() if name not in _ENGINE_KEYWORDS})


def _unscale(
    strategy: Strategy, precision: Precision, computing: StepCalls, accelerator: Any, optimizer: Any = None
) -> None:
    """Unscale the gradients of the run's optimizer, or of others, once per update."""
    if computing.optimizer is None:
        type(accelerator).unscale_gradients(accelerator, optimizer)
    elif precision.policy.loss_scaling and Owns.SCALING not in strategy.owns:
        if not computing.syncs:
            raise TaskError(
                "Cannot unscale or clip gradients before the last micro-batch of an update.",
                f"precision={precision.policy.name!r} adds scaled gradients to them.",
                "Do it where trainer.accelerator.sync_gradients is True, or in on_pre_optimizer_step.",
            )
        optimizers: list[Any] = (
            list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer or computing.optimizer]
        )
        for item in optimizers:
            # accelerate wraps the optimizers that it prepares.
            precision.unscale(getattr(item, "optimizer", item))


def _clip_norm(
    strategy: Strategy,
    computing: StepCalls,
    accelerator: Any,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
) -> torch.Tensor | None:
    """Clip like the run: unscaled gradients, by their norm over all processes."""
    if computing.optimizer is None or Owns.CLIP in strategy.owns:
        if computing.optimizer is not None:
            warn_once(
                f"accelerator.clip_grad_norm_ has no effect with strategy={strategy.name!r}, which clips in its own "
                "step. Set max_grad_norm in the arguments instead."
            )
        norm: torch.Tensor | None = type(accelerator).clip_grad_norm_(accelerator, parameters, max_norm, norm_type)
        return norm
    accelerator.unscale_gradients()
    return strategy.clip_grad_norm(list(parameters), max_norm, norm_type)


def _has_engine(state: Any) -> bool:
    return state.get("deepspeed_plugins") is not None or state.get("fsdp_plugin") is not None


def _check(accelerator: Any, strategy: Strategy) -> None:
    actual = (accelerator.process_index, accelerator.num_processes, accelerator.device.type)
    expected = (strategy.rank, strategy.world_size, strategy.device_type)
    if actual != expected:
        raise StrategyError(
            f"Cannot use or assign trainer.accelerator with strategy={strategy.name!r}.",
            f"accelerate says (rank, processes, device) = {actual}, the strategy {expected}.",
            "Make no Accelerator or PartialState before the Trainer, or let it describe the same processes.",
        )


def _settings(args: Any, policy: Any, *, device_type: str) -> tuple[str, dict[str, Any]]:
    """Return the mixed precision by accelerate's name, and the loader settings.

    On the CPU fp16 is passed as "no", because accelerate does not support it there, while torch does.
    """
    sharing = read_accelerator_config(args)
    names = {"float16": "fp16", "bfloat16": "bf16"}
    mixed = names.get(str(policy.compute_dtype).removeprefix("torch."), "no") if policy.autocast else "no"
    if device_type == "cpu" and mixed == "fp16":
        mixed = "no"
    # As documented, the order depends on the seed; accelerate's own default draws it from the global generator.
    loading = {"use_seedable_sampler": True, **{k: sharing[k] for k in _LOADER_SETTINGS if k in sharing}}
    return mixed, {**loading, "data_seed": args.data_seed}
