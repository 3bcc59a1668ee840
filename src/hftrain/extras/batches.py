"""Callbacks that look at the batch, the outputs and the loss of a micro-step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback

_EVENTS = frozenset({"on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"})


class BatchCallback(TrainerCallback):
    """Base class of callbacks that receive `batch`, `outputs` and `loss`, those of the last micro-batch.

    They come as keyword arguments of `on_substep_end`, `on_pre_optimizer_step`, `on_optimizer_step` and `on_step_end`.
    `outputs` is what the model's forward pass returned, None if a task calls only parts of its model. `loss` is
    detached, and scaled to its share of the step as for the backward pass. Reading a value of them synchronises with
    the device. A run without such a callback makes no call for it.

    Example:
        >>> class Lengths(BatchCallback):
        ...     def on_step_end(self, args, state, control, batch, loss, **kwargs):
        ...         kwargs["logger"].log({"length": batch["input_ids"].shape[1]})
    """

    _hook: Any = None

    def wrap_parts(self, parts: Any) -> Any:
        """Note what each micro-step uses and gives."""
        extras: dict[str, Any] = {}
        train_step = parts.hooks.training_step

        def training_step(model: Any, batch: Any, num_items: Any) -> Any:
            extras.update(batch=batch, outputs=None, loss=None)  # frees the last outputs before the next forward pass
            extras["loss"] = loss = train_step(model, batch, num_items)
            return loss

        def note(module: Any, inputs: Any, outputs: Any) -> None:
            extras["outputs"] = outputs

        self.close_run()
        # Traced into a compiled model, it would break on the first new object.
        self._hook = parts.model.register_forward_hook(torch.compiler.disable(note))  # type: ignore[no-untyped-call]
        return replace(
            parts, events=_Events(parts.events, extras), hooks=replace(parts.hooks, training_step=training_step)
        )

    def close_run(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _Events:
    def __init__(self, events: Any, extras: dict[str, Any]) -> None:
        self._events, self._extras = events, extras

    def __getattr__(self, name: str) -> Any:
        return getattr(self._events, name)

    def fire(self, event: str, **extra: Any) -> Any:
        return self._events.fire(event, **({**self._extras, **extra} if event in _EVENTS else extra))
