"""What a training step needs of a device's memory, seen in real steps of a rehearsal."""

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
from hftrain.precision.base import Precision
from hftrain.storage.space import readable_bytes
from hftrain.strategies.base import Strategy

# The optimizer makes its state in the first step, DDP its buckets again in the second: the third is like all others.
_NUM_STEPS = 3
# A scaled loss overflows at first, and a step that is skipped makes no state: more than it takes to bring 2**16 to 1.
_MOST_STEPS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The most memory that a training step of this process holds on its device, and what for.

    Args:
        parameters_bytes: Parameters and buffers.
        gradients_bytes: Gradients of all trainable parameters.
        optimizer_bytes: What the optimizer remembers.
        activations_bytes: What remains of the peak: activations, and what is computed with on the way.
        peak_bytes: All together, at the moment when it is most.

    Units:
        bytes, of this process; where several share a model's state, each holds its part.
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


def estimate_memory(
    strategy: Strategy,
    precision: Precision,
    *,
    rehearse: Callable[[int, TrainerCallback], None],
    read_wrapped: Callable[[], nn.Module],
) -> MemoryEstimate:
    """Rehearse a training, and return the most memory that a step of it holds; collective.

    Args:
        rehearse: Rehearses so many steps with one more callback.
    """
    kind = strategy.device_type
    if strategy.name.startswith("deepspeed") or not (
        kind == "cpu" or hasattr(_memory_of(kind), "max_memory_allocated")
    ):
        raise ConfigError(
            f"Cannot estimate the memory with strategy={strategy.name!r} on {kind!r}.",
            "torch does not tell the peak of its memory.",
            "Use the engine's own estimate, such as DeepSpeed's estimate_zero3_model_states_mem_needs_all_live.",
        )
    found: list[MemoryEstimate] = []
    watch = _StepWatch(kind, precision, read_wrapped, found)
    rehearse(_MOST_STEPS if precision.policy.loss_scaling else _NUM_STEPS, watch)
    if not found:
        raise ConfigError(
            f"Cannot estimate the memory with precision={precision.policy.name!r}.",
            "The gradients of every step it took overflowed, so the optimizer never made its state.",
            "See that the loss is finite, or ask with precision='bf16', which takes as much.",
        )
    return found[-1]


@dataclass(eq=False)
class _StepWatch(TrainerCallback):
    """Count what is alive in the course of each step, with what was there before it.

    Args:
        precision: Counts the steps that it skips.
        found: Takes an estimate for each step; a rehearsal forgets what callbacks note in themselves.
    """

    device_type: str
    precision: Precision
    read_wrapped: Callable[[], nn.Module]
    found: list[MemoryEstimate]

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
        # DDP made the buckets that it exchanges gradients in when it wrapped the model.
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
    """Return the bytes of this process's parts of tensors; memory that several share counts once."""
    parts: list[Any] = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def _meter(device_type: str) -> Iterator[int]:
    """Begin to count what a device allocates; the second value is the most of it at a time, in bytes."""
    if device_type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            yield 0
        assert profiled.profiler is not None
        found = profiled.profiler.kineto_results.events()
        events = sorted((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
        yield max(accumulate((num_bytes for _, num_bytes in events), initial=0))
    else:
        memory = _memory_of(device_type)
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        yield 0
        yield memory.max_memory_allocated() - before


def _memory_of(device_type: str) -> Any:
    return getattr(torch, device_type, None)
