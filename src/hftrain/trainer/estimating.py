"""What a training step needs of a device's memory, seen in one real step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hftrain.core.tree import map_tensors


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
