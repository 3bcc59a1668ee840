"""Location of the first non-finite value, by recording the inputs and outputs of modules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import get_logger

logger = get_logger(__name__)

_HEAD = " abs min   abs max  what"


class DebugUnderflowOverflow:
    """Check every module of a model and stop at the first infinity or NaN with a report of the preceding calls.

    Hooks the model's modules until `remove` is called. A frame describes one module's forward call: the smallest and
    largest absolute values of its parameters, inputs and outputs. Each forward pass of the model counts as a batch.
    Every module call synchronises with the device: use this for debugging only.

    Args:
        model: The model to watch.
        max_frames_to_save: Number of frames in the report, the newest last.
        trace_batch_nums: Batches, counted from 0, whose frames are all logged; these batches never stop the run.
        abort_after_batch_num: Batch after which to stop even without an error.

    Raises:
        ConfigError: `max_frames_to_save` is below 1.

    Source: the documented `DebugUnderflowOverflow`.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] = (),
        abort_after_batch_num: int | None = None,
    ) -> None:
        if max_frames_to_save < 1:
            problem, reason = f"Cannot use max_frames_to_save={max_frames_to_save!r}.", "A report needs a frame."
            raise ConfigError(problem, reason, "Use 1 or more.")
        self.model = model
        self.trace_batch_nums = frozenset(trace_batch_nums)
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = 0
        self._frames: deque[str] = deque(maxlen=max_frames_to_save)
        self._names = {module: name or "(the model)" for name, module in model.named_modules()}
        # If the hook were traced into a compiled model, the batch number would trigger a recompilation per batch.
        hook = torch.compiler.disable(self._after_forward)  # type: ignore[no-untyped-call]
        self._handles = [module.register_forward_hook(hook, with_kwargs=True) for module in model.modules()]

    def remove(self) -> None:
        """Remove the hooks; safe to call repeatedly."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _after_forward(
        self, module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any], output: Any
    ) -> None:
        is_traced = self.batch_number in self.trace_batch_nums
        faults = self._add_frame(module, inputs, options, output)
        if is_traced:
            logger.warning("Batch %d\n%s\n%s", self.batch_number, _HEAD, self._frames[-1])
        elif faults:
            frames = "\n".join(self._frames)
            logger.error("The last %d frames before the fault:\n%s\n%s", len(self._frames), _HEAD, frames)
            raise TaskError(
                f"A watched forward pass reached {self._names[module]} ({type(module).__name__}).",
                f"In batch {self.batch_number} its {' and '.join(faults)} held an infinity or NaN.",
                "The log above this error shows the frames that led to it; look for the first large number.",
            )
        if module is self.model:
            self.batch_number += 1
            if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
                problem = f"Cannot use abort_after_batch_num={self.abort_after_batch_num}."
                raise TaskError(problem, "That batch is done.", "Leave abort_after_batch_num out to go on.")

    def _add_frame(self, module: nn.Module, inputs: Any, options: Any, output: Any) -> list[str]:
        """Record a frame; return the names of inputs and outputs that are not finite."""
        lines = [f"{'':20}{self._names[module]} {type(module).__name__}"]
        faults = []
        parts = {"input": inputs[0] if len(inputs) == 1 else inputs, "output": output}
        checked = [named for name, value in parts.items() for named in _tensors(value, name)]
        # Keyword arguments are shown but are never faults: masks are passed that way, and hold infinities on purpose.
        unchecked = [*_tensors(dict(module.named_parameters(recurse=False)), "parameter"), *_tensors(options, "input")]
        for is_checked, tensors in ((False, unchecked), (True, checked)):
            for name, tensor in tensors:
                low, high = torch.stack(torch.aminmax(tensor.detach().abs().float())).tolist()
                lines.append(f"{low:8.2e}  {high:8.2e}  {name}")
                if is_checked and not high < math.inf:
                    faults.append(name)
        self._frames.append("\n".join(lines))
        return faults


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        # This process's shard of a sharded parameter.
        value = value.to_local() if hasattr(value, "to_local") else value
        if value.is_floating_point() and value.numel():
            yield name, value
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from _tensors(element, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, element in enumerate(value):
            yield from _tensors(element, f"{name}[{index}]")
