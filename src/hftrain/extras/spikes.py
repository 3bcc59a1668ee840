"""Notice updates whose loss or gradient norm jumps, and leave them out or go back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import get_logger
from hftrain.step.legality import check_gradients_at_hand

logger = get_logger(__name__)

# A normal distribution's standard deviation, in median absolute deviations.
_DEVIATION = 1.4826
_MAX_REWINDS = 3


class SpikeGuard(TrainerCallback):
    """Compare the loss and the gradient norm of each step with those of the last ones, before the update.

    A step is a spike if one of the two is not below median + `sigma_factor` deviations of the last
    `rolling_interval_length` steps; the deviation is 1.4826 times the median absolute deviation. The loss is the mean
    over all processes, and the norm is that of all gradients (only with `max_grad_norm` or group clipping), so all
    processes decide the same. The values of spikes count, too: a new level ends being one. Each spike is logged, and an
    entry with ``spike_loss``, ``spike_grad_norm`` and ``spike_is_skipped`` is added to `state.log_history`. Costs one
    exchange of two numbers and one synchronisation with the device per step.

    Args:
        on_spike: ``"warn"``; or ``"skip"``: leave the update out, with no trace in the optimizer. The step counts, its
            samples are used up, and the schedule moves on. ``"rewind"``: also load weights, optimizers and averages of
            the newest checkpoint, so all samples since then are left out; like a skipped step, those steps count. A
            checkpoint that only a signal or the clock had asked for is not gone back to, if others are planned.
        rolling_interval_length: How many steps are compared; nothing is decided before half of them.
        sigma_factor: How many deviations a value may lie above the median.

    Raises:
        ConfigError: A value cannot be used, the optimizer updates before its gradients are complete, or there is no
            checkpoint to which ``"rewind"`` could go back.
        TaskError: A fourth spike goes back to the same checkpoint.
        StrategyError: The strategy's engine updates itself (DeepSpeed).

    Source: OLMo et al., 2024, arXiv 2501.00656, and the names of its `SkipStepOptimizer`.

    Example:
        >>> guard = SpikeGuard("skip", rolling_interval_length=128, sigma_factor=6)  # Trainer(..., callbacks=[guard])
    """

    def __init__(
        self, on_spike: str = "warn", *, rolling_interval_length: int = 128, sigma_factor: float = 6.0
    ) -> None:
        if on_spike not in ("warn", "skip", "rewind") or rolling_interval_length < 2 or not sigma_factor > 0:
            raise ConfigError(
                f"Cannot use SpikeGuard({on_spike!r}, rolling_interval_length={rolling_interval_length}, "
                f"sigma_factor={sigma_factor}).",
                "on_spike must be 'warn', 'skip' or 'rewind', the length at least 2 and the factor above 0.",
                "Correct the value.",
            )
        self.on_spike, self.rolling_interval_length = on_spike, rolling_interval_length
        self.sigma_factor = sigma_factor
        self._values, self._num_steps = torch.zeros(0), 0
        self._loss: Any = 0.0
        self._spike: torch.Tensor | None = None
        self._parts: Any = None
        # The checkpoint to which the last spikes went back, and how many.
        self._last_rewind = ("", 0)

    def checkpoint_objects(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this callback."""
        return {"window": self}

    def state_dict(self) -> dict[str, Any]:
        """Return the compared values and the number of steps."""
        return {"values": self._values.clone(), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; another length starts with an empty window."""
        if state["values"].shape == self._values.shape:
            self._values.copy_(state["values"])
            self._num_steps = state["num_steps"]

    def wrap_stepper(self, stepper: Any, *, optimizer: Any, strategy: Any, precision: Any, **_: Any) -> Any:
        """Return the calls of a step, with the losses added up."""
        check_gradients_at_hand(self, optimizer, strategy)
        # Losses and norms of the last steps; NaN where there was no finite one yet.
        self._values = torch.full((2, self.rolling_interval_length), torch.nan, device=strategy.device)
        self._num_steps, self._loss = 0, 0.0
        self._backends = strategy, precision, optimizer

        def backward(loss: torch.Tensor, **options: Any) -> None:
            self._loss = self._loss + loss.detach().float()
            stepper.backward(loss, **options)

        return replace(stepper, backward=backward)

    def wrap_parts(self, parts: Any) -> Any:
        """Decide before the update, after the clipping of all callbacks, whatever their order."""
        self._parts, self._last_rewind = parts, ("", 0)
        if self.on_spike == "rewind" and parts.hooks.rewind is None:
            raise ConfigError(
                "Cannot use SpikeGuard('rewind').",
                "No checkpoint of this run can be loaded while it trains: save_strategy='no' plans none, "
                "save_only_model=True leaves the optimizer out, and XLA loads weights only at the start.",
                "Save whole checkpoints (save_strategy='steps'), or use SpikeGuard('skip').",
            )
        (strategy, precision, optimizer), stepper = self._backends, parts.stepper
        norms: list[Any] = [None]

        def clip() -> Any:
            norms[0] = stepper.clip()
            return norms[0]

        def step() -> bool:
            # A norm that is not computed is 0 in every step, and never a spike.
            numbers = (self._loss, 0.0 if norms[0] is None else norms[0])
            tensors = [torch.as_tensor(number, dtype=torch.float32, device=strategy.device) for number in numbers]
            values, self._loss = strategy.reduce(torch.stack(tensors), "mean"), 0.0
            if not self._is_spike(values, leaves_overflow=precision.policy.loss_scaling) or self.on_spike == "warn":
                return bool(stepper.step())
            if precision.policy.loss_scaling:
                precision.unscale(optimizer)  # the scaler must have looked at the gradients
                precision.update_scale()
            return True

        return replace(parts, stepper=replace(stepper, clip=clip, step=step))

    def _is_spike(self, new: torch.Tensor, *, leaves_overflow: bool) -> bool:
        """Compare the values of a step with the window, then add them to it; synchronises."""
        median = self._values.nanmedian(dim=1).values
        deviation = _DEVIATION * (self._values - median[:, None]).abs().nanmedian(dim=1).values
        is_outlier = ~(new <= median + self.sigma_factor * deviation)  # also NaN
        if leaves_overflow:
            is_outlier &= new[1].isfinite()  # the precision skips such a step itself, and lowers its scale
        is_spike = bool(is_outlier.any()) and self._num_steps >= max(2, self.rolling_interval_length // 2)
        self._values[:, self._num_steps % self.rolling_interval_length] = torch.where(new.isfinite(), new, torch.nan)
        self._num_steps += 1
        self._spike = torch.stack([new, median]) if is_spike else None
        return is_spike

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._spike is not None:
            (loss, norm), (usual_loss, usual_norm) = self._spike.tolist()
            is_skipped = self.on_spike != "warn"
            logger.warning(
                "Step %d is a spike%s: loss %.4g (median %.4g), gradient norm %.4g (median %.4g).",
                *(state.global_step, ", and its update was left out" * is_skipped, loss, usual_loss, norm, usual_norm),
            )
            entry = {"spike_loss": loss, "spike_grad_norm": norm, "spike_is_skipped": is_skipped}
            kwargs["logger"].log(entry)
            self._spike = None
            if self.on_spike == "rewind":
                # Once all callbacks are done with the step, and before a signal or the clock saves it.
                self._parts.pending.insert(0, self._rewind)

    def _rewind(self) -> None:
        """Load the newest checkpoint's weights, but not the same one again and again."""
        self._parts.pending.remove(self._rewind)
        folder, step = self._parts.hooks.rewind(), self._parts.progress.step
        if folder is None:
            logger.warning("Step %d has no checkpoint to go back to yet. Its update was left out.", step)
            return
        name, number = self._last_rewind
        self._last_rewind = (folder.name, number + 1 if folder.name == name else 1)
        if self._last_rewind[1] > _MAX_REWINDS:
            raise TaskError(
                f"Cannot continue at step {step}, which is a spike.",
                f"Going back to {folder.name} {_MAX_REWINDS} times, each time with other samples, has not helped.",
                "Resume from it with a lower learning_rate, or use SpikeGuard('skip').",
            )
