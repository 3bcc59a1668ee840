"""Optimizers by name: the class, its arguments, and the object built on a model's parameter groups."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, explain
from hftrain.core.registry import Registry
from hftrain.optim.groups import parameter_groups
from hftrain.optim.options import cast_options, parse_options

OptimizerClass = tuple[type[Optimizer], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Which optimizer, and how it is set.

    Args:
        name: A name of `optimizers`.
        learning_rate: The base rate, which a schedule multiplies.
        weight_decay: The decay of the parameters that decay.
        betas: Adam's averaging factors; other optimizers do not read them.
        eps: Adam's denominator term; other optimizers take theirs from `options`.
        options: What else the optimizer's class takes, as a mapping or as ``"key=value, key=value"``.

    Source: the documented `optim`, `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2`, `adam_epsilon` and
    `optim_args`.
    """

    name: str = "adamw_torch"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    options: Mapping[str, Any] | str | None = None


def optimizer_class(config: OptimizerConfig, model: nn.Module | None = None) -> OptimizerClass:
    """Return the optimizer's class and its keyword arguments, parameters not included.

    Args:
        config: Which optimizer, and how it is set.
        model: Needed by optimizers that treat some modules differently.

    Raises:
        ConfigError: The name is unknown or not wired; an option is unknown or unreadable.

    Source: the documented `Trainer.get_optimizer_cls_and_kwargs`.

    Example:
        >>> optimizer_class(OptimizerConfig(name="sgd", learning_rate=0.1, options="momentum=0.9"))
        (<class 'torch.optim.sgd.SGD'>, {'lr': 0.1, 'momentum': 0.9})
    """
    return optimizers.create(config.name, config=config, model=model)


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, *, decay_names: Iterable[str] | None = None
) -> Optimizer:
    """Build the optimizer of a model's trainable parameters.

    Args:
        config: Which optimizer, and how it is set.
        model: The model, placed and wrapped.
        decay_names: The parameters that decay; the documented rule by default.

    Raises:
        ConfigError: See `optimizer_class` and `parameter_groups`.
    """
    cls, settings = optimizer_class(config, model)
    return optimizer_from_class(cls, settings, model, weight_decay=config.weight_decay, decay_names=decay_names)


def optimizer_from_class(
    cls: type[Optimizer],
    settings: Mapping[str, Any],
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    decay_names: Iterable[str] | None = None,
) -> Optimizer:
    """Build an optimizer from its class and keyword arguments, on the documented parameter groups.

    Args:
        cls: The optimizer's class.
        settings: Its keyword arguments. A `params`, `model` or `optimizer_dict` among them takes the groups' place.
        model: The model, placed and wrapped.
        weight_decay: The decay of the parameters that decay, unless `settings` names it.
        decay_names: The parameters that decay; the documented rule by default.

    Raises:
        ConfigError: `settings` and `weight_decay` contradict each other; see also `parameter_groups`.

    Source: the documented `optimizer_cls_and_kwargs`.
    """
    settings = dict(settings)
    own = [settings.pop(key) for key in ("params", "model", "optimizer_dict") if key in settings]
    if own:
        return cls(own[0], **settings)
    decay = settings.pop("weight_decay", weight_decay)
    if weight_decay not in (0.0, decay):
        raise ConfigError(
            explain(
                f"{cls.__name__} was asked for with two weight decays.",
                "The optimizer's own arguments and the weight_decay setting differ.",
                "Give one of them.",
                weight_decay=weight_decay,
                optimizer_weight_decay=decay,
            )
        )
    return cls(parameter_groups(model, weight_decay=decay, decay_names=decay_names), **settings)


def with_options(cls: type[Optimizer], config: OptimizerConfig, **given: Any) -> OptimizerClass:
    """Pair a class with the learning rate, `given`, and the config's options cast by the class' own signature.

    What has an argument of its own (`lr`, `weight_decay`, whatever is in `given`) is not an option.

    Raises:
        ConfigError: An option is unknown or unreadable.
    """
    given = {"lr": config.learning_rate, **given}
    taken = {"params", "weight_decay", *given}
    parameters = inspect.signature(cls, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in parameters.items() if name not in taken}
    options = cast_options(parse_options(config.options), hints, owner=f"optim={config.name!r}")
    return cls, {**given, **options}


def from_torch(config: OptimizerConfig, model: nn.Module | None, *, cls: type[Optimizer]) -> OptimizerClass:
    """Handle an optimizer of torch that takes everything but the learning rate from the options."""
    return with_options(cls, config)


def adamw(config: OptimizerConfig, model: nn.Module | None, **fixed: Any) -> OptimizerClass:
    """Handle torch's AdamW. Source: Loshchilov and Hutter, 2019, arXiv 1711.05101."""
    return with_options(torch.optim.AdamW, config, betas=config.betas, eps=config.eps, **fixed)


def adamw_hf(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Handle the name of an AdamW that is no more: torch's takes its place, with a warning."""
    warnings.warn("optim='adamw_hf' is now 'adamw_torch'; write that.", FutureWarning, stacklevel=2)
    return adamw(config, model)


def not_wired(config: OptimizerConfig, model: nn.Module | None, *, package: str) -> NoReturn:
    """Refuse a documented optimizer of an optional package.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        explain(
            f"optim={config.name!r} was asked for.",
            f"It is documented but not wired in this version; it belongs to the package {package!r}.",
            "Pass its class with optimizer_cls_and_kwargs, the optimizer with optimizers, or use 'adamw_torch'.",
            optim=config.name,
        )
    )


optimizers: Registry[OptimizerClass] = Registry("optim", group="hftrain.optimizers")
optimizers.register("adamw_torch", adamw)
optimizers.register("adamw_torch_fused", adamw, fused=True)
optimizers.register("adamw_hf", adamw_hf)
optimizers.register("sgd", from_torch, cls=torch.optim.SGD)
optimizers.register("adagrad", from_torch, cls=torch.optim.Adagrad)
optimizers.register("rmsprop", from_torch, cls=torch.optim.RMSprop)

# An optimizer that is wired leaves this table: one file in extras/, one line above.
_NOT_WIRED = {
    "torch_xla": "adamw_torch_xla",
    "torch_npu": "adamw_torch_npu_fused",
    "apex": "adamw_apex_fused",
    "transformers": "adafactor",
    "torchdistx": "adamw_anyprecision",
    "torchao": "adamw_torch_4bit adamw_torch_8bit",
    "bitsandbytes": "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit "
    "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit "
    "lion_8bit lion_32bit paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit",
    "galore-torch": "galore_adamw galore_adamw_8bit galore_adafactor "
    "galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise",
    "lomo-optim": "lomo adalomo",
    "grokadamw": "grokadamw",
    "schedulefree": "schedule_free_radam schedule_free_adamw schedule_free_sgd",
    "apollo-torch": "apollo_adamw apollo_adamw_layerwise",
    "torch-optimi": "stable_adamw",
}
for _package, _names in _NOT_WIRED.items():
    for _name in _names.split():
        optimizers.register(_name, not_wired, package=_package)
