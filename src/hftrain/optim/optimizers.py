"""Optimizers by name: their options, which users give as text or a mapping, and the optimizer of a model's groups."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, MissingDependencyError
from hftrain.core.extras import require
from hftrain.core.log import warn_once
from hftrain.core.registry import Registry
from hftrain.optim.fused import can_fuse, check_fusible, fit_gradients, fit_moments
from hftrain.optim.groups import parameter_groups

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_options(options: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Parse `optim_args`: a mapping, or text of the form ``"key=value, key=value"``.

    Source: the documented `optim_args`.

    Example:
        >>> parse_options("momentum=0.9, nesterov = True")
        {'momentum': '0.9', 'nesterov': 'True'}
    """
    if not isinstance(options, str):
        return dict(options or {})
    pairs = [[part.strip() for part in pair.split("=")] for pair in options.split(",")] if options.strip() else []
    values = {pair[0]: pair[-1] for pair in pairs}
    if len(values) < len(pairs) or any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ConfigError(
            f"Cannot use optim_args={options!r}.",
            "It must be 'key=value' pairs separated by commas, each key once.",
            "Write it like 'momentum=0.9, nesterov=True', or pass a dict.",
        )
    return values


def refuse_unknown(
    options: Iterable[str], known: Iterable[str], *, owner: str, field: str, reason: str = "It has no such option."
) -> None:
    """Raise if an option is unknown.

    Args:
        owner: The setting that takes the options, as the user wrote it (``"optim='sgd'"``).
    """
    known = sorted(known)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"Cannot use {owner} with {field} {', '.join(map(repr, unknown))}.",
            reason,
            f"It takes: {', '.join(known)}." if known else "It takes none.",
            **{field: list(options)},
        )


def cast_options(options: Mapping[str, Any], hints: Mapping[str, Any], *, owner: str) -> dict[str, Any]:
    """Cast option values by the type hints.

    Example:
        >>> cast_options({"nesterov": "False", "momentum": "0.9"}, {"nesterov": bool, "momentum": float}, owner="sgd")
        {'nesterov': False, 'momentum': 0.9}
    """
    reason = "It has no such option; learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon are settings."
    refuse_unknown(options, hints, owner=owner, field="optim_args", reason=reason)
    cast = {}
    for key, value in options.items():
        try:
            cast[key] = _cast(str(value), get_args(hints[key]) or (hints[key],))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"Cannot use {owner} with optim_args {key}={value!r}.",
                f"{key} must be {getattr(hints[key], '__name__', hints[key])}.",
                "Correct the value.",
            ) from error
    return cast


def _cast(text: str, kinds: tuple[Any, ...]) -> Any:
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        # bool("False") is True, so the words are looked up instead.
        return _BOOLEANS[text.lower()]
    if float in kinds:
        return float(text)
    return int(text) if int in kinds else text


OptimizerClass = tuple[type[Optimizer], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The choice of an optimizer and its settings.

    Args:
        betas: Adam's averaging factors; other optimizers ignore them.
        eps: Adam's denominator term; other optimizers take theirs from `options`.
        options: Further arguments of the optimizer's class, as a mapping or as ``"key=value, key=value"``.
        target_modules: The linear modules that a low-rank optimizer projects; see `low_rank.find_targets`.
        warmup_steps: For optimizers that warm up themselves.
        use_cpu: Whether to train on the CPU even if there is a GPU.

    Units:
        warmup_steps: optimizer updates.

    Source: the documented `optim`, `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2`, `adam_epsilon`,
    `optim_args` and `optim_target_modules`.
    """

    name: str = "adamw_torch"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    options: Mapping[str, Any] | str | None = None
    target_modules: str | Sequence[str] | None = None
    warmup_steps: int = 0
    use_cpu: bool = False

    @classmethod
    def of(cls, args: Any) -> OptimizerConfig:
        """Return the config that the training arguments choose."""
        return cls(
            name=str(args.optim),
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            options=args.optim_args,
            target_modules=args.optim_target_modules,
            # A warm-up ratio needs the run's length, which is known here only if it is set in steps.
            warmup_steps=args.get_warmup_steps(max(args.max_steps, 0)),
            use_cpu=bool(args.use_cpu),
        )

    def optimizer_class(self, model: nn.Module | None = None) -> OptimizerClass:
        """Return the optimizer's class and its keyword arguments, without the parameters.

        Source: the documented `Trainer.get_optimizer_cls_and_kwargs`.

        Example:
            >>> OptimizerConfig(name="sgd", learning_rate=0.1, options="momentum=0.9").optimizer_class()
            (<class 'torch.optim.sgd.SGD'>, {'lr': 0.1, 'momentum': 0.9})
        """
        cls, settings = optimizers.create(self.name, config=self, model=model)
        if self.target_modules is not None and "targets" not in settings:
            warn_once(f"optim={self.name!r} treats all modules the same way: optim_target_modules has no effect.")
        return cls, settings


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """Build the optimizer of a model's trainable parameters."""
    cls, settings = config.optimizer_class(model)
    return optimizer_from_class(cls, settings, model, weight_decay=config.weight_decay)


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
        settings: Its keyword arguments. `params`, `model` or `optimizer_dict` among them replaces the groups.
        weight_decay: The decay of the parameters that decay, unless `settings` names it.

    Source: the documented `optimizer_cls_and_kwargs`.
    """
    settings = dict(settings)
    given_groups = [settings.pop(key) for key in ("params", "model", "optimizer_dict") if key in settings]
    if given_groups:
        return cls(given_groups[0], **settings)
    decay = settings.pop("weight_decay", weight_decay)
    if weight_decay not in (0.0, decay):
        raise ConfigError(
            f"Cannot use {cls.__name__} with two weight decays.",
            "The optimizer's own arguments and the weight_decay setting differ.",
            "Give one of them.",
            weight_decay=weight_decay,
            optimizer_weight_decay=decay,
        )
    groups = parameter_groups(model, weight_decay=decay, decay_names=decay_names)
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_chosen = settings.get("fused") is True
    if is_chosen:
        check_fusible(cls, parameters)
    is_fused = not is_chosen and can_fuse(cls, settings, model, parameters)
    if is_fused:
        groups = [{**group, "fused": True} for group in groups]
    optimizer = cls(groups, **settings)
    if is_fused or is_chosen:
        optimizer.register_step_pre_hook(partial(fit_gradients, is_chosen=is_chosen))
        optimizer.register_load_state_dict_post_hook(fit_moments)
    if "weight_decay" in optimizer.defaults:
        # For groups that are added later; AdamW's own default is 0.01.
        optimizer.defaults["weight_decay"] = decay
    return optimizer


def with_options(cls: type[Optimizer], config: OptimizerConfig, **settings: Any) -> OptimizerClass:
    """Return a class with its arguments: the learning rate, `given`, and the options cast by its signature.

    Settings with an argument of their own (`lr`, `weight_decay`, those in `given`) are not options.
    """
    settings = {"lr": config.learning_rate, **settings}
    reserved = {"params", "weight_decay", *settings}
    parameters = inspect.signature(cls, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in parameters.items() if name not in reserved}
    return cls, {**settings, **read_options(config, hints)}


def read_options(config: OptimizerConfig, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's options, cast by the type hints of the optimizer's options."""
    return cast_options(parse_options(config.options), hints, owner=f"optim={config.name!r}")


def from_torch(config: OptimizerConfig, model: nn.Module | None, *, cls: type[Optimizer]) -> OptimizerClass:
    """Return a torch optimizer that takes everything but the learning rate from the options."""
    return with_options(cls, config)


def adamw(config: OptimizerConfig, model: nn.Module | None, **fixed: Any) -> OptimizerClass:
    """Return torch's AdamW. Source: Loshchilov and Hutter, 2019, arXiv 1711.05101."""
    return with_options(torch.optim.AdamW, config, betas=config.betas, eps=config.eps, **fixed)


optimizers: Registry[OptimizerClass] = Registry("optim", group="hftrain.optimizers")
_LAYERWISE, _NOT_LAYERWISE = {"is_layerwise": True}, {"is_layerwise": False}
# The handler (a name in `hftrain.optim.extras` if it is text), its summary, and the keywords of the name.
_TABLE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "adamw_torch": (adamw, "torch", {}),
    "adamw_torch_fused": (adamw, "torch", {"fused": True}),
    "adamw_hf": (adamw, "torch", {}),
    "sgd": (from_torch, "torch", {"cls": torch.optim.SGD}),
    "adagrad": (from_torch, "torch", {"cls": torch.optim.Adagrad}),
    "rmsprop": (from_torch, "torch", {"cls": torch.optim.RMSprop}),
    "adamw_anyprecision": ("anyprecision:adamw_anyprecision", "torch", {}),
    "adafactor": ("adafactor:adafactor", "transformers", {}),
    "adamw_torch_xla": ("packaged:vendors_adamw", "torch_xla", {"path": "torch_xla.amp.syncfree:AdamW"}),
    "adamw_torch_npu_fused": ("packaged:vendors_adamw", "torch_npu", {"path": "torch_npu.optim:NpuFusedAdamW"}),
    "adamw_apex_fused": ("packaged:vendors_adamw", "apex", {"path": "apex.optimizers:FusedAdam"}),
    "adamw_torch_4bit": ("torchao:adamw", "torchao", {"bits": 4}),
    "adamw_torch_8bit": ("torchao:adamw", "torchao", {"bits": 8}),
    "adamw_bnb_8bit": ("bitsandbytes:adamw", "bitsandbytes", {"bits": 8}),
    "adamw_8bit": ("bitsandbytes:adamw", "bitsandbytes", {"bits": 8}),
    "ademamix": ("bitsandbytes:ademamix", "bitsandbytes", {"bits": 32}),
    "ademamix_8bit": ("bitsandbytes:ademamix", "bitsandbytes", {"bits": 8}),
    "lion_32bit": ("bitsandbytes:lion", "bitsandbytes", {"bits": 32}),
    "lion_8bit": ("bitsandbytes:lion", "bitsandbytes", {"bits": 8}),
    "rmsprop_bnb": ("bitsandbytes:rmsprop", "bitsandbytes", {"bits": 32}),
    "rmsprop_bnb_32bit": ("bitsandbytes:rmsprop", "bitsandbytes", {"bits": 32}),
    "rmsprop_bnb_8bit": ("bitsandbytes:rmsprop", "bitsandbytes", {"bits": 8}),
    "paged_adamw_32bit": ("bitsandbytes:adamw", "bitsandbytes", {"bits": 32, "is_paged": True}),
    "paged_adamw_8bit": ("bitsandbytes:adamw", "bitsandbytes", {"bits": 8, "is_paged": True}),
    "paged_ademamix_32bit": ("bitsandbytes:ademamix", "bitsandbytes", {"bits": 32, "is_paged": True}),
    "paged_ademamix_8bit": ("bitsandbytes:ademamix", "bitsandbytes", {"bits": 8, "is_paged": True}),
    "paged_lion_32bit": ("bitsandbytes:lion", "bitsandbytes", {"bits": 32, "is_paged": True}),
    "paged_lion_8bit": ("bitsandbytes:lion", "bitsandbytes", {"bits": 8, "is_paged": True}),
    "galore_adamw": ("low_rank:galore_adamw", "galore-torch", _NOT_LAYERWISE),
    "galore_adamw_8bit": ("low_rank:galore_adamw_8bit", "galore-torch", _NOT_LAYERWISE),
    "galore_adafactor": ("low_rank:galore_adafactor", "galore-torch", _NOT_LAYERWISE),
    "galore_adamw_layerwise": ("low_rank:galore_adamw", "galore-torch", _LAYERWISE),
    "galore_adamw_8bit_layerwise": ("low_rank:galore_adamw_8bit", "galore-torch", _LAYERWISE),
    "galore_adafactor_layerwise": ("low_rank:galore_adafactor", "galore-torch", _LAYERWISE),
    "apollo_adamw": ("low_rank:apollo_adamw", "apollo-torch", _NOT_LAYERWISE),
    "apollo_adamw_layerwise": ("low_rank:apollo_adamw", "apollo-torch", _LAYERWISE),
    "lomo": ("lomo:lomo", "lomo-optim", {}),
    "adalomo": ("lomo:adalomo", "lomo-optim", {}),
    "grokadamw": ("grokadamw:grokadamw", "grokadamw", {}),
    "schedule_free_adamw": ("packaged:schedule_free", "schedulefree", {"kind": "AdamW"}),
    "schedule_free_radam": ("packaged:schedule_free", "schedulefree", {"kind": "RAdam"}),
    "schedule_free_sgd": ("packaged:schedule_free", "schedulefree", {"kind": "SGD"}),
    "muon": ("muon:muon", "torch", {}),
    "stable_adamw": ("packaged:stable_adamw", "torch-optimi", {}),
}
for _name, (_handler, _summary, _preset) in _TABLE.items():
    _target = f"hftrain.optim.extras.{_handler}" if isinstance(_handler, str) else _handler
    optimizers.register(_name, _target, summary=_summary, **_preset)


def load(path: str, requirement: str, config: OptimizerConfig, *, extra: str | None = None) -> Any:
    """Import an optimizer's class."""
    feature = f"optim={config.name!r}"
    require(requirement, feature=feature, extra=extra)
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"Cannot use {feature}.",
            f"{requirement!r} is installed, but {module} has no {name} that works here: {error}.",
            "Install a build of the package that suits this machine, or choose another optimizer.",
        ) from error


def check_cuda(config: OptimizerConfig, *, reason: str) -> None:
    """Raise if the run cannot use a CUDA device."""
    if config.use_cpu or not torch.cuda.is_available():
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            f"It runs on CUDA devices only: {reason}.",
            "Use a machine with such a device, or choose another optimizer.",
            use_cpu=config.use_cpu,
        )
