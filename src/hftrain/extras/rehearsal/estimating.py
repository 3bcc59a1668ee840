"""Device memory of a training step, measured in the steps of a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from hftrain.callbacks import TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.core.preserve import temporarily
from hftrain.precision.base import Precision
from hftrain.run.parts import TrainerHooks
from hftrain.storage.files import readable_bytes

# The first step allocates the optimizer state and the second rebuilds DDP's buckets; the third is like all others.
_NUM_STEPS = 3
# A scaled loss overflows at first, and skipped steps allocate no state: more steps than reducing 2**16 to 1 takes.
_MOST_STEPS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The peak device memory of a training step in this process, and its parts.

    Args:
        parameters_bytes: Parameters and buffers.
        gradients_bytes: Gradients of all trainable parameters.
        optimizer_bytes: The optimizer's state.
        activations_bytes: The rest of the peak: activations and temporary tensors.
        peak_bytes: The total at its peak.

    Units:
        bytes, of this process; if a model's state is sharded, each process holds its part.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer state", "activations", "peak")
        counts = zip(names, astuple(self), strict=True)
        return "\n".join(f"{name:<16}{readable_bytes(count):>10}" for name, count in counts)


def estimate_memory(trainer: TrainerHooks, train: Callable[[Any], object]) -> MemoryEstimate:
    """Rehearse a training and return the peak memory of a step; collective."""
    strategy, precision, kind = trainer.strategy, trainer.precision, trainer.strategy.device_type
    if strategy.name.startswith("deepspeed") or (kind != "cpu" and extra("memory").device_meter(kind) is None):
        raise ConfigError(
            f"Cannot estimate the memory with strategy={strategy.name!r} on {kind!r}.",
            "torch does not report its peak memory.",
            "Use the engine's own estimate, such as DeepSpeed's estimate_zero3_model_states_mem_needs_all_live.",
        )
    found: list[MemoryEstimate] = []
    watch = _StepWatch(kind, precision, lambda: trainer.model_wrapped, found)
    num_steps = _MOST_STEPS if precision.policy.loss_scaling else _NUM_STEPS
    trainer.callback_handler.add(watch)
    try:
        with temporarily(trainer, fast_dev_run=num_steps):
            train(trainer)
    finally:
        trainer.callback_handler.remove(watch)
    if not found:
        raise ConfigError(
            f"Cannot estimate the memory with precision={precision.policy.name!r}.",
            "The gradients of every step it took overflowed, so the optimizer never made its state.",
            "Check that the loss is finite, or estimate with precision='bf16', which needs the same memory.",
        )
    return found[-1]


@dataclass(eq=False)
class _StepWatch(TrainerCallback):
    """Measure the live memory during each step, including memory allocated before it."""

    device_type: str
    precision: Precision
    read_wrapped: Callable[[], nn.Module]
    found: list[MemoryEstimate]  # one outside, because a rehearsal restores the callbacks' attributes

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self._held = _size([*model.parameters(), *model.buffers(), *_states(optimizer)])
        self._meter = _meter(self.device_type)
        next(self._meter)
        self._skipped = self._num_skipped()

    def _num_skipped(self) -> float:
        return self.precision.logs().get("skipped_steps", 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gradients = _size(p.grad for p in kwargs["model"].parameters() if p.grad is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        peak = self._held + next(self._meter)
        if self._num_skipped() > self._skipped:
            return
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        parameters, kept = _size([*model.parameters(), *model.buffers()]), _size(_states(optimizer))
        # DDP allocated the buckets for gradient exchange when it wrapped the model.
        buckets = self._gradients if isinstance(self.read_wrapped(), DistributedDataParallel) else 0
        peak += buckets
        estimate = MemoryEstimate(
            parameters_bytes=parameters,
            gradients_bytes=self._gradients + buckets,
            optimizer_bytes=kept,
            activations_bytes=max(0, peak - parameters - kept - self._gradients - buckets),
            peak_bytes=peak,
        )
        self.found.append(estimate)
        if len(self.found) == _NUM_STEPS:
            control.should_training_stop = True


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this process's parts of tensors; memory shared by tensors counts once."""
    parts: list[Any] = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def _meter(device_type: str) -> Iterator[int]:
    """Start counting a device's allocations; the second value yielded is their peak, in bytes."""
    if device_type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            yield 0
        assert profiled.profiler is not None
        found = profiled.profiler.kineto_results.events()
        events = sorted((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
        yield max(accumulate((num_bytes for _, num_bytes in events), initial=0))
    else:
        meter = extra("memory").device_meter(device_type)
        meter.start()
        yield 0
        yield sum(meter.deltas().values())
