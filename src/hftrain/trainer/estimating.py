"""What a training step needs of a device's memory, seen in real steps of a rehearsal."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hftrain.callbacks import TrainerCallback
from hftrain.core.errors import ConfigError, explain
from hftrain.core.tree import map_tensors

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

# The optimizer makes its state in the first step; the second is like all that follow.
_NUM_STEPS = 2


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
        lines = [
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("activations", self.activations_bytes),
            ("peak", self.peak_bytes),
        ]
        return "\n".join(f"{name:<16}{count / 2**20:>12,.1f} MiB" for name, count in lines)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of all tensors of a kind of device that are alive, as operations make them.

    What a kernel takes for itself and gives back unseen is not counted.

    Args:
        device_type: The kind of device.
        present: Tensors that are there already.
    """

    def __init__(self, device_type: str, present: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        for tensor in present:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the memory it made."""
        made = func(*args, **(kwargs or {}))
        map_tensors(made, self._note)
        return made

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == self.device_type:
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known[storage] = None
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return tensor

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


def estimate_memory(trainer: Trainer) -> MemoryEstimate:
    """Rehearse a training, and return the most memory that a step of it holds; collective.

    Raises:
        ConfigError: The strategy computes where torch does not see the memory.
    """
    strategy = trainer.strategy
    if strategy.device_type == "xla" or strategy.name.startswith("deepspeed"):
        raise ConfigError(
            explain(
                f"estimate_memory() was called with strategy={strategy.name!r}.",
                "Its engine keeps memory of its own, which torch does not see.",
                "Use the engine's own estimate, such as DeepSpeed's estimate_zero3_model_states_mem_needs_all_live.",
            )
        )
    found: list[MemoryEstimate] = []
    watch, asked = _StepWatch(trainer, found), trainer.fast_dev_run
    trainer.add_callback(watch)
    trainer.fast_dev_run = _NUM_STEPS
    try:
        # What is compiled hides its memory from the count.
        with torch.compiler.set_stance("force_eager"):
            type(trainer).train(trainer)
    finally:
        trainer.fast_dev_run = asked
        trainer.remove_callback(watch)
    return found[-1]


class _StepWatch(TrainerCallback):
    """Count what is alive in the course of each step, with what was there before it.

    Args:
        trainer: Whose steps.
        found: Takes an estimate for each step; a rehearsal forgets what callbacks note in themselves.
    """

    def __init__(self, trainer: Trainer, found: list[MemoryEstimate]) -> None:
        self.trainer = trainer
        self.found = found
        self._live: LiveBytes | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        held = [*model.parameters(), *model.buffers(), *_states(optimizer)]
        self._live = LiveBytes(self.trainer.strategy.device_type, map(_local, held))
        self._live.__enter__()  # type: ignore[no-untyped-call]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gradients = _size(p.grad for p in kwargs["model"].parameters() if p.grad is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        live, self._live = self._live, None
        assert live is not None
        live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        parameters, kept = _size([*model.parameters(), *model.buffers()]), _size(_states(optimizer))
        # DDP made the buckets that it exchanges gradients in when it wrapped the model.
        buckets = self._gradients if isinstance(self.trainer.model_wrapped, DistributedDataParallel) else 0
        peak = live.peak + buckets
        estimate = MemoryEstimate(
            parameters_bytes=parameters,
            gradients_bytes=self._gradients + buckets,
            optimizer_bytes=kept,
            activations_bytes=max(0, peak - parameters - kept - self._gradients - buckets),
            peak_bytes=peak,
        )
        self.found.append(estimate)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _size(tensors: Iterable[torch.Tensor]) -> int:
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in map(_local, tensors)}
    return sum(storages.values())
