"""How a model is cut into the stages of a pipeline, and who holds what of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain

import torch
from torch import nn

from hftrain.core.errors import ConfigError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Cut:
    """Which stage computes which part of a model.

    Args:
        layers: The name of the list of layers (`nn.ModuleList` or `nn.Sequential`); empty for the model itself.
        children: The names of the layers in that list.
        bounds: The index of the first layer of each stage, then the number of layers.
        parts: The stage of each part outside the list: the first stage or the last.
        owners: The stages that hold each tensor of the model's state, by name; tied tensors can have several.
            Buffers that are missing here belong to all stages.
    """

    layers: str
    children: tuple[str, ...]
    bounds: tuple[int, ...]
    parts: Mapping[str, int]
    owners: Mapping[str, tuple[int, ...]]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.bounds) - 1

    def own(self, stage: int) -> list[str]:
        """Return the names of a stage's parts and layers, which hold all of its parameters."""
        parts = [name for name, owner in self.parts.items() if owner == stage]
        return [*parts, *map(self.layer, range(self.bounds[stage], self.bounds[stage + 1]))]

    def layer(self, index: int) -> str:
        """Return the name of a layer in the model."""
        return f"{self.layers}.{self.children[index]}" if self.layers else self.children[index]


def divide(model: nn.Module, num_stages: int) -> Cut:
    """Cut a model's list of layers so that the largest stage has as few parameters as possible.

    Parts that run before the layers belong to the first stage, the others to the last one. Their order is that in
    which the model registers them, unless it is declared: by ``pipeline_parts`` of the model (names of parts in
    running order, among them the list of layers), or by transformers' ``base_model_pp_plan`` and ``_pp_plan``.

    Raises:
        ConfigError: The model has no list of layers, fewer layers than there are stages, parameters outside all parts,
            batch normalization, or an encoder and a decoder.
    """
    title = f"Cannot cut {type(model).__name__} into {num_stages} stages."
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        reason = "Each layer of its decoder needs what the encoder computes, and stages send each other one tensor."
        raise ConfigError(title, reason, "Use pp_size=1 for encoder-decoders.")
    order = _declared_parts(model)
    layers = _layers(model, order)
    body = model.get_submodule(layers)
    children = tuple(name for name, _ in body.named_children())
    if len(children) < num_stages:
        raise ConfigError(title, f"It has {len(children)} layers.", f"Use pp_size={len(children)} or less.")
    norm = next((name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)), None)
    if norm is not None:
        reason = f"{norm} normalizes each micro-batch by its own statistics, which differ from those of the batch."
        raise ConfigError(title, reason, "Use a normalization of single samples (LayerNorm, GroupNorm), or pp_size=1.")
    parts = dict(_parts(model, layers, order, num_stages - 1))
    sizes = [_size(child) for child in body.children()]
    ends = [0, 0]
    for name, stage in parts.items():
        ends[stage > 0] += _size(model.get_submodule(name))
    bounds = tuple(_balanced(sizes, ends[0], ends[1], num_stages))
    cut = Cut(layers, children, bounds, parts, {})
    return replace(cut, owners=_owners(model, cut, title))


def release(model: nn.Module, cut: Cut, stage: int) -> None:
    """Move the tensors that other stages hold to the meta device, in place; names and their order stay."""
    to_meta = cache(_meta)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _tensors(module, recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            if stage not in cut.owners.get(full_name, (stage,)) and not tensor.is_meta:
                setattr(module, name, to_meta(tensor))


def _declared_parts(model: nn.Module) -> list[str]:
    """Return the names of parts in the order that the model declares; empty if it declares none."""
    if names := getattr(model, "pipeline_parts", None):
        return list(names)
    base = getattr(model, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None) or {}
    prefix = "" if base is model else f"{getattr(model, 'base_model_prefix', '')}."
    return [*(prefix + name for name in plan), *(getattr(model, "_pp_plan", None) or {} if base is not model else ())]


def _layers(model: nn.Module, order: Sequence[str]) -> str:
    """Return the name of the list of layers: the declared one, or the outermost list with the most parameters."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    }
    outermost = [name for name in lists if not any(other != name and _is_in(name, other) for other in lists)]
    candidates = [name for name in order if name in lists] or outermost
    if not candidates:
        raise ConfigError(
            f"Cannot cut {type(model).__name__} into stages.",
            "It has no list of layers (nn.ModuleList or nn.Sequential).",
            "Put the repeated layers into one, or use pp_size=1.",
        )
    return max(candidates, key=lambda name: _size(lists[name]))


def _parts(model: nn.Module, layers: str, order: Sequence[str], last: int) -> Iterator[tuple[str, int]]:
    """Yield the parts outside the list of layers, and their stages: modules that do not contain it, the largest."""
    is_after = False
    parts: list[str] = []
    for name, module in model.named_modules():
        if name == layers:
            is_after = True
            continue
        pairs = [(layers, name), (name, layers), *((name, part) for part in parts)]
        if not any(_is_in(*pair) for pair in pairs) and next(module.parameters(), None) is not None:
            parts.append(name)
            is_declared = name in order and layers in order
            yield name, last * (order.index(name) > order.index(layers) if is_declared else is_after)


def _is_in(name: str, owner: str) -> bool:
    return not owner or name == owner or name.startswith(f"{owner}.")


def _owners(model: nn.Module, cut: Cut, title: str) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each tensor; a tensor with several names belongs to the stages of all of them."""
    stage_of_part = {name: stage for stage in range(cut.num_stages) for name in cut.own(stage)}
    stages: dict[int, set[int]] = {}
    names: dict[str, int] = {}
    for name, tensor in _tensors(model):
        owner = next((stage for part, stage in stage_of_part.items() if _is_in(name, part)), None)
        if owner is None and isinstance(tensor, nn.Parameter):
            reason = f"The parameter {name} belongs to no part: its module also contains the layers."
            raise ConfigError(title, reason, "Move it into a module of its own.")
        if owner is not None:
            stages.setdefault(id(tensor), set()).add(owner)
            names[name] = id(tensor)
    return {name: tuple(sorted(stages[key])) for name, key in names.items()}


def _balanced(sizes: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """Return the bounds of runs of layers, none empty, whose largest sum is smallest.

    The first run holds `first` besides, the last one `last`.

    Example:
        >>> _balanced([1, 1, 1, 1], 2, 0, 2)
        [0, 1, 4]
    """
    total = [0, *accumulate(sizes)]
    best = {end: (total[end] + first, [0, end]) for end in range(1, len(total))}
    for stage in range(2, stages + 1):
        extra = last if stage == stages else 0
        best = {
            end: min(
                (max(best[start][0], total[end] - total[start] + extra), [*best[start][1], end])
                for start in range(stage - 1, end)
            )
            for end in range(stage, len(total))
        }
    return best[len(sizes)][1]


def hollow(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device."""
    return copy.deepcopy(module, {id(tensor): _meta(tensor) for _, tensor in _tensors(module)})


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters("", recurse, remove_duplicate=False)
    return chain(parameters, module.named_buffers("", recurse, remove_duplicate=False))


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
