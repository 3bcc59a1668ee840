"""A real `accelerate.Accelerator` for scripts and subclasses; the loops need none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hftrain.adapter.acceleration import accelerator_settings
from hftrain.core.errors import StrategyError, explain
from hftrain.core.tree import map_tensors
from hftrain.strategies.base import Strategy

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

_PLUGINS = frozenset({"deepspeed_plugin"})


def make_accelerator(trainer: Trainer) -> Any:
    """Return an `Accelerator` that agrees with the strategy and the precision; launches the strategy. Collective.

    It converts and wraps nothing by being made. Its `gather` takes tensors with different numbers of rows. Its state is
    its own: a second Trainer's accelerator, of another precision, leaves it as it is.

    Raises:
        StrategyError: Somebody set accelerate up for other processes or another device than the strategy's.
    """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin

    strategy = trainer.strategy
    strategy.launch()
    num_steps, mixed, loading = accelerator_settings(
        trainer.args, trainer.precision.policy, device_type=strategy.device_type
    )
    options = strategy.accelerator_options()
    # Given to it, accelerate would drop the plugin on a CPU, and leave an environment variable set.
    fsdp_plugin = options.pop("fsdp_plugin", None)
    known = AcceleratorState._shared_state
    if known and (known.get("_mixed_precision") != mixed or options.keys() & _PLUGINS or _has_engine(known)):
        # A singleton, which would keep what an earlier Trainer told it.
        AcceleratorState._reset_state()
    if _is_of_another_device(strategy):
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator: Any = Accelerator(
        mixed_precision=mixed,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=num_steps, sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(**loading),
        **options,
    )
    for shared in (accelerator.state, accelerator.gradient_state):
        shared.__dict__ = dict(vars(shared))  # its own from here on
    if fsdp_plugin is not None:
        accelerator.state.fsdp_plugin = fsdp_plugin
    _check(accelerator, strategy)
    if strategy.world_size > 1:
        # Its own takes for granted that processes hold as many rows each; batches of an evaluation differ.
        accelerator.gather = lambda tensor: map_tensors(tensor, strategy.gather)
    return accelerator


def has_engine(strategy: Strategy, engine: str) -> bool:
    """Tell whether a strategy, or one that it derives from, is of an engine (``"fsdp"``, ``"deepspeed"``)."""
    return any(engine in str(vars(kind).get("name", "")) for kind in type(strategy).__mro__)


def _has_engine(known: Any) -> bool:
    return known.get("deepspeed_plugins") is not None or known.get("fsdp_plugin") is not None


def _is_of_another_device(strategy: Strategy) -> bool:
    """Tell whether accelerate was set up, by one process on its own, for another kind of device."""
    from accelerate import PartialState

    known = PartialState._shared_state
    return (
        bool(known)
        and strategy.world_size == 1
        and torch.device(known.get("device", "cpu")).type != strategy.device_type
    )


def _check(accelerator: Any, strategy: Strategy) -> None:
    found = (accelerator.process_index, accelerator.num_processes, accelerator.device.type)
    wanted = (strategy.rank, strategy.world_size, strategy.device_type)
    if found != wanted:
        raise StrategyError(
            explain(
                f"trainer.accelerator was asked for with strategy={strategy.name!r}.",
                f"accelerate says (rank, processes, device) = {found}, the strategy {wanted}.",
                "Make no Accelerator or PartialState before the Trainer, or let it describe the same processes.",
            )
        )
