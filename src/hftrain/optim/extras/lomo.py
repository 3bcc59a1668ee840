"""LOMO and AdaLomo: plain and adaptive updates during the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.preserve import temporarily
from hftrain.optim.extras.in_backward import UpdatesInBackward
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, check_cuda, load, read_options

logger = get_logger(__name__)

# The attributes that AdaLomo keeps outside torch's optimizer state.
_OWN_STATE = ("step_num", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")


class InBackward(UpdatesInBackward):
    """A mix-in for the package's classes that controls their hooks.

    Outside `update_in_backward` the hooks do nothing, and `step` uses the gradients that exist: those that
    were averaged over ranks and clipped by the strategy.
    """

    clips = True
    takes_ranks = True
    _is_updating = False

    def fuse_update(self) -> Callable[[Any], Any]:
        """Return the hook of each parameter; the package also calls it with 0 after the backward pass."""
        update: Callable[[Any], Any] = super().fuse_update()  # type: ignore[misc]

        def hook(grad: Any) -> Any:
            return grad if isinstance(grad, torch.Tensor) and not self._is_updating else update(grad)

        return hook

    def update_in_backward(
        self, loss: torch.Tensor, *, backward: Callable[[torch.Tensor], None], max_norm: float
    ) -> None:
        """Run the package's backward pass; clipping needs an additional backward pass before it to compute the norm."""
        this: Any = self
        this.clip_grad_norm = max_norm or None
        with temporarily(self, _is_updating=True):
            if max_norm:
                this.grad_norm(loss)
            this.fused_backward(loss, self.param_groups[0]["lr"])

    def last_norm(self) -> torch.Tensor | None:
        """Return the norm before clipping; it is only known if clipping is on."""
        this: Any = self
        return torch.linalg.vector_norm(this.grad_norms) if this.clip_grad_norm else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update with the remaining gradients: all of them, or none after `update_in_backward`."""
        this: Any = self
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        this.lr, this.clip_grad_norm = self.param_groups[0]["lr"], None
        if hasattr(this, "step_num"):
            this.step_num += 1
            # AdaLomo divides by a loss scale, but the loss is not scaled here.
            for gradient in gradients:
                gradient.mul_(float(this.loss_scale or 1.0))
        this.grad_func(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, including AdaLomo's averages."""
        averages = {name: getattr(self, name) for name in _OWN_STATE if hasattr(self, name)}
        return {**super().state_dict(), "own": averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        remaining = dict(state_dict)
        for name, saved in remaining.pop("own", {}).items():
            if isinstance(saved, dict):
                for key, tensor in getattr(self, name).items():
                    tensor.copy_(saved[key])
            else:
                setattr(self, name, saved)
        super().load_state_dict(remaining)


def lomo(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return LOMO. Source: Lv et al., 2023, arXiv 2306.09782."""
    return _class_and_settings("Lomo", config, model, {"clip_grad_value": float})


def adalomo(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return AdaLomo. Source: Lv et al., 2023, arXiv 2310.10195."""
    check_cuda(config, reason="the package keeps its averages there")
    hints = dict.fromkeys(("clip_threshold", "decay_rate", "clip_grad_value"), float)
    return _class_and_settings("AdaLomo", config, model, hints)


def _class_and_settings(
    name: str, config: OptimizerConfig, model: nn.Module | None, hints: dict[str, Any]
) -> OptimizerClass:
    cls = load(f"lomo_optim:{name}", "lomo-optim", config, extra="lomo")
    if model is None:
        raise ConfigError(f"Cannot use optim={config.name!r}.", "It hooks into the model.", "Pass the model along.")
    if config.weight_decay:
        logger.warning("optim=%r decays every parameter, biases and norms too.", config.name)
    subclass = type(cls.__name__, (InBackward, cls), {"__module__": cls.__module__})
    settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay, **read_options(config, hints)}
    return subclass, {"model": model, **settings}
