"""The units of a sharded model: modules whose parameters are gathered and freed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from hftrain.core.errors import ConfigError, check_known
from hftrain.core.parameters import layer_hint
from hftrain.strategies.trainable_parameters import Follower


def check_choice(strategy: str, *, layer_classes: Sequence[str] | None, min_num_params: int) -> None:
    """Raise if both ways to choose a strategy's units are set; see `find_units`."""
    if min_num_params and layer_classes:
        reason = "min_num_params and transformer_layer_cls_to_wrap are two ways to choose what is wrapped."
        raise ConfigError(f"Cannot use strategy={strategy!r}.", reason, "Keep one of the two.")


def find_units(model: nn.Module, *, layer_classes: Sequence[str] | None, min_num_params: int) -> list[nn.Module]:
    """List the modules of a model that become separate units, inner ones first; the rest is one more unit.

    A module that shares a parameter with modules outside of it (tied embeddings) stays in the outermost unit.

    Args:
        model: The whole model; it is not listed itself.
        layer_classes: Class names of the modules; None uses the model's own hint, `_no_split_modules`.
        min_num_params: Choose modules by their number of parameters instead; 0 disables this.

    Raises:
        ConfigError: No module is of a named class.

    Source: the documented `transformer_layer_cls_to_wrap` and `min_num_params`.
    """
    if min_num_params:
        candidates = list(_by_size(model, min_num_params))
    else:
        candidates = _by_class(model, layer_classes)
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
    return [unit for unit in candidates if unit is not model and not _shares(unit, owners)]


def check_dtypes(model: nn.Module, units: Sequence[nn.Module], *, strategy: str) -> None:
    """Raise `ConfigError` if parameters of several dtypes train in one unit; units are as `find_units` lists them."""
    parameters: set[nn.Parameter] = set()
    for unit in (*units, model):
        added = {parameter for parameter in unit.parameters() if parameter.requires_grad} - parameters
        parameters |= added
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in added})
        if len(dtypes) > 1:
            raise ConfigError(
                f"Cannot train {type(model).__name__} with strategy={strategy!r}.",
                f"Its unit {type(unit).__name__} trains parameters of {' and '.join(dtypes)}, and FSDP reduces the "
                "gradients of a unit together.",
                "Give them one dtype (model.float()), freeze those of the others, or make units of the parts that "
                "have one (transformer_layer_cls_to_wrap).",
            )


def _by_class(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    present = {type(module).__name__ for module in model.modules() if module is not model}
    for name in names or ():
        reason = f"{type(model).__name__} has no part of that class (upper and lower case count)."
        check_known(name, present, f"Cannot use transformer_layer_cls_to_wrap={name!r}.", reason)
    wanted = set(layer_hint(model)) if names is None else set(names)
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in wanted]


def _by_size(module: nn.Module, minimum: int) -> Iterator[nn.Module]:
    """Yield modules with at least `minimum` parameters, not counting those of yielded modules inside them."""
    num_params = sum(parameter.numel() for parameter in module.parameters())
    if size_based_auto_wrap_policy(module, True, num_params, min_num_params=minimum):
        for child in module.children():
            for unit in _by_size(child, minimum):
                num_params -= sum(parameter.numel() for parameter in unit.parameters())
                yield unit
    if size_based_auto_wrap_policy(module, False, num_params, min_num_params=minimum):
        yield module


def _shares(unit: nn.Module, homes: dict[int, set[nn.Module]]) -> bool:
    inside = set(unit.modules())
    return any(not homes[id(parameter)] <= inside for parameter in unit.parameters())


class SplitParameters(Follower):
    """The parameters that FSDP has sharded."""

    def _named_parameters(self, model: Any) -> list[tuple[str, nn.Parameter]]:
        split_again(model)  # otherwise it holds gathered parameters instead of the sharded ones
        return super()._named_parameters(model)

    def _apply_changes(self, model: Any, additions: dict[str, nn.Parameter], removals: list[str]) -> None:
        self._refuse_added({name: p for name, p in additions.items() if not isinstance(p, DTensor)})
        super()._apply_changes(model, additions, removals)


def split_again(model: nn.Module) -> None:
    """Free a model's gathered parameters; must not be called within a pass. Mutates the model.

    After a forward pass that raised an error, the engine's state is mid-forward, in which it would not reshard.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._training_state = type(group._training_state).IDLE
            module.reshard()
