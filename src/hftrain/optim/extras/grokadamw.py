"""GrokAdamW: AdamW that amplifies slow gradients."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError
from hftrain.core.parameters import is_weightless
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, load, read_options


class Resumable(Optimizer):
    """A mix-in for the package's class: it keeps its state in the groups, and state dicts need it by parameter."""

    def step(self, closure: Any = None) -> Any:
        """Update the parameters; suppresses the package's warnings about a deprecated autocast."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*torch\.cuda\.amp\.autocast", category=FutureWarning)
            warnings.filterwarnings("ignore", message=".*CUDA is not available", category=UserWarning)
            return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter."""
        packed = super().state_dict()
        state, groups = dict(packed["state"]), []
        for group, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            states = group.get("state", {})
            pairs = zip(saved["params"], group["params"], strict=True)
            state.update({key: states[p] for key, p in pairs if p in states})
            groups.append({key: value for key, value in saved.items() if key != "state"})
        return {**packed, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["state"] = {p: self.state.pop(p) for p in group["params"] if p in self.state}


def grokadamw(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return GrokAdamW, which clips each parameter's gradient as well (`gradient_clipping`, 1.0 by default).

    Raises:
        ConfigError: The model is a stage of a pipeline.

    Source: https://github.com/cognitivecomputations/grokadamw
    """
    if model is not None and not is_weightless() and any(parameter.is_meta for parameter in model.parameters()):
        reason = "It averages a parameter's gradients by its place among all, and a stage holds only some of them."
        raise ConfigError("Cannot use optim='grokadamw' in a pipeline.", reason, "Use another optimizer, or pp_size=1.")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        cls = load("grokadamw:GrokAdamW", "grokadamw", config, extra="grokadamw")
    finally:
        # The package configures the root logger when it is imported.
        root.handlers[:] = handlers
        root.setLevel(level)
    names = ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping")
    options = read_options(config, dict.fromkeys(names, float))
    subclass = type(cls.__name__, (Resumable, cls), {"__module__": cls.__module__})
    return subclass, {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, **options}
