"""Averages of the weights: exponential moving average (EMA) and stochastic weight averaging (SWA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.core.log import warn_once


class WeightAverage(TrainerCallback):
    """Base class: average the trained weights, and use the average for evaluations, exports and after the training.

    The model has the averages in every `evaluate`, `predict` and `save_model` of a training, and once it has ended.
    Checkpoints hold both: the model's files the weights that train, from which a resume continues, and
    ``own_optimizers.pt`` the averages. With `load_best_model_at_end`, the averages of the best checkpoint are loaded.
    Buffers, such as the statistics of batch normalization, are not averaged: the model's own are used. Under FSDP each
    process averages its shards.

    Args:
        device: Where the averages are kept; None keeps them beside the parameters.
    """

    holds_weights = True
    has_left_average = False  # in the model, by a training that has ended

    def __init__(self, *, device: str | torch.device | None = None) -> None:
        self.device = device
        self.averages: dict[str, torch.Tensor] = {}
        self.num_averaged = 0
        self._parameters: list[tuple[str, nn.Parameter]] = []

    def share(self) -> float:
        """Return the share of the average that remains at the next update."""
        raise NotImplementedError

    def checkpoint_objects(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this callback."""
        return {"averages": self}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start from the weights of the model; a resume then restores the averages.

        Raises:
            ConfigError: The best model is loaded at the end, from checkpoints without the averages.
        """
        if args.load_best_model_at_end and args.save_only_model:
            raise ConfigError(
                f"Cannot use {type(self).__name__} with load_best_model_at_end=True and save_only_model=True.",
                "Checkpoints would hold the weights that train, and not the averages that were evaluated.",
                "Leave save_only_model out.",
            )
        self.has_left_average = False
        self._parameters, self.averages, self.num_averaged = list(kwargs["model"].named_parameters()), {}, 0
        self._pairs()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the averages in the model, if there are any."""
        self.has_left_average = self.num_averaged > 0
        with torch.no_grad():
            for parameter, average in self._pairs() if self.num_averaged else ():
                parameter.copy_(average)

    def close_run(self) -> None:
        """Let go of the parameters; the averages stay."""
        self._parameters = []

    @torch.no_grad()
    def update(self) -> None:
        """Average the current parameters in."""
        pairs = self._pairs()
        parameters = [parameter.to(average.device, average.dtype) for parameter, average in pairs]
        average_in: Any = get_ema_multi_avg_fn(self.share())  # type: ignore[no-untyped-call]
        average_in([average for _, average in pairs], parameters, None)
        self.num_averaged += 1

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Give the model the averages in the context, and its own weights after it."""
        pairs = self._pairs() if self.num_averaged else []
        trained = [parameter.clone() for parameter, _ in pairs]
        for parameter, average in pairs:
            parameter.copy_(average)
        try:
            yield
        finally:
            for (parameter, _), value in zip(pairs, trained, strict=True):
                parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the names of their parameters."""
        return {"averages": dict(self.averages), "num_averaged": self.num_averaged}

    def make_room(self, state: Mapping[str, Any]) -> None:
        """Average the parameters of a saved state, which may be other ones than those that train at the start."""
        parameters = dict(self._parameters)
        if missing := sorted(state["averages"].keys() - parameters.keys()):
            raise CheckpointError(
                f"Cannot restore the averages of {type(self).__name__}.",
                f"The model has no parameters named {', '.join(missing[:3])}.",
                "Train the model that was saved.",
            )
        self.averages = {name: self._initial_average(parameters[name]) for name in state["averages"]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, after `make_room`."""
        for name, average in state["averages"].items():
            self.averages[name].copy_(average)
        self.num_averaged = state["num_averaged"]

    def _initial_average(self, parameter: nn.Parameter) -> torch.Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        device = parameter.device if parameter.is_meta else self.device or parameter.device
        return parameter.detach().to(device, dtype, copy=True)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the averaged parameters with their averages, of those that train by now."""
        averages = self.averages
        for name, parameter in self._parameters:
            if name not in averages and parameter.requires_grad and parameter.is_floating_point():
                averages[name] = self._initial_average(parameter)
        # Stages of a pipeline average what they hold; other parameters are on the meta device.
        own_parameters = [(name, parameter.detach()) for name, parameter in self._parameters if not parameter.is_meta]
        return [(parameter, averages[name]) for name, parameter in own_parameters if name in averages]


class EMA(WeightAverage):
    """Keep an exponential moving average of the weights.

    Args:
        decay: The share of the average that remains at each update.
        every: Steps between updates.
        warmup: Whether the first updates decay faster: by ``(1 + n) / (10 + n)`` after n updates, if that is less.
        device: See `WeightAverage`.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> EMA(decay=0.99, every=10).share()
        0.1
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every: int = 1,
        warmup: bool = True,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(device=device)
        self.decay, self.every, self.warmup = decay, every, warmup
        if not 0 <= decay < 1 or every < 1:
            raise ConfigError(
                f"Cannot use EMA(decay={decay}, every={every}).",
                "The decay is the share of the average that remains, and every counts steps.",
                "Use a decay from 0 to below 1, such as 0.999, and every=1 or more.",
            )

    def share(self) -> float:
        return min(self.decay, (1 + self.num_averaged) / (10 + self.num_averaged)) if self.warmup else self.decay

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.update()


class SWA(WeightAverage):
    """Average the weights of the last part of a training with equal shares.

    Args:
        start: When to begin: a step, or a share of all steps below 1.
        every: Steps between updates; None for the end of each epoch.
        device: See `WeightAverage`.

    Raises:
        ConfigError: A value is out of its range.

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018.
    """

    def __init__(
        self, start: float = 0.75, *, every: int | None = None, device: str | torch.device | None = None
    ) -> None:
        super().__init__(device=device)
        self.start, self.every = start, every
        if start < 0 or (every is not None and every < 1):
            raise ConfigError(
                f"Cannot use SWA(start={start}, every={every}).",
                "The start is a step or a share of all steps, and every counts steps.",
                "Use start=0.75 or a step, and every=1 or more.",
            )

    def share(self) -> float:
        return self.num_averaged / (self.num_averaged + 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `WeightAverage`; warn of batch normalization."""
        super().on_train_begin(args, state, control, **kwargs)
        if any(hasattr(module, "running_mean") for module in kwargs["model"].modules()):
            warn_once(
                "SWA averages no statistics of batch normalization: they are of the last weights. Before you use the "
                "model, call torch.optim.swa_utils.update_bn(trainer.get_train_dataloader(), trainer.model)."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average the weights in, if they are due after steps."""
        if self.every is not None and self._has_begun(state) and state.global_step % self.every == 0:
            self.update()

    def wrap_parts(self, parts: Any) -> Any:
        """Keep the progress, which tells whether an epoch has ended."""
        self._progress = parts.progress
        return parts

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average the weights in, if they are due after epochs; not when a run stops within one and can be resumed."""
        is_over = not self._progress.is_within_epoch or state.global_step >= state.max_steps
        if self.every is None and is_over and self._has_begun(state):
            self.update()

    def _has_begun(self, state: Any) -> bool:
        start = self.start * state.max_steps if self.start < 1 else self.start
        return bool(state.global_step >= start)
