"""Which module of a model gets which style: from transformers' plans, plans by name, and the task."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hftrain.core.errors import ConfigError, check_known, listed
from hftrain.strategies.mesh.styles import (
    Colwise,
    Experts,
    Rowwise,
    SharedKey,
    Style,
    TensorRanks,
    Vocabulary,
    apply_style,
    is_conv1d,
    place,
    uncalled,
)

# By the names that transformers' plans use.
STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(gathers=True),
    "colwise_rep": Colwise(gathers=True),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(splits=True),
    "embedding_rowwise": Vocabulary(),
    "replicated": Style(),
    "replicated_with_grad_allreduce": Style(partial=True),
    "packed_colwise": Colwise(packed=2),
    "packed_qkv_colwise": Colwise(packed=3),
    "moe_tp_experts": Experts(),
    "mla_kv_a_proj": SharedKey(),
}
# Of experts, whose module has the style.
_OF_EXPERTS = ("gate_up_proj", "down_proj")
# What models' own plans lack, by `config.model_type`.
_PLANS: dict[str, dict[str, str]] = {
    "apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "gpt2": {
        "transformer.wte": "embedding_rowwise",
        "transformer.h.*.attn.c_attn": "packed_qkv_colwise",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
}
# Attributes of modules that count a rank's own part, by the class of the module.
_COUNTS = {
    **{"GPT2Attention": ("split_size",), "Conv1D": ("nf",), "WhisperAttention": ("num_heads",)},
    **dict.fromkeys(("T5Attention", "MT5Attention", "UMT5Attention"), ("n_heads",)),
}


@dataclass(frozen=True, kw_only=True)
class Placing:
    """One module of a model and how the ranks share it.

    Args:
        dims: The dimension along which each of its own parameters is sharded; None where it is held whole.
        opens: Whether what follows it differs by rank, up to the next module that closes.
        closes: Whether what follows it is the same on all ranks again.
    """

    name: str
    module: nn.Module
    style: Style
    dims: Mapping[str, int | None]
    opens: bool = False
    closes: bool = False


def find_plan(model: nn.Module, given: Mapping[str, Any] | None) -> dict[str, Style]:
    """Return the styles by pattern of module names, in which ``*`` stands for one part of a name.

    Args:
        given: The user's plan, whose patterns replace those of the model's own (`tp_plan`), or of the one for its type.

    Raises:
        ConfigError: There is no plan, or a style is not known.
    """
    base = base_of(model)
    defaults = _PLANS.get(getattr(getattr(base, "config", None), "model_type", ""), {})
    plan: dict[str, Any] = {}
    for each in (given, defaults, getattr(base, "tp_plan", None)):  # the first pattern that matches wins
        plan = {**plan, **{pattern: style for pattern, style in (each or {}).items() if pattern not in plan}}
    if not plan:
        raise ConfigError(
            f"Cannot share the layers of {type(base).__name__} among tensor ranks:",
            "nothing says which of its modules are split, and how.",
            "Pass plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, or define TaskModule.parallelize(mesh).",
        )
    styles = {}
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            problem = f"Cannot use the style {style!r} for {pattern}."
            check_known(style, STYLES, problem, "It is not one whose gradients are proved.")
        styles[pattern] = style if isinstance(style, Style) else STYLES[style]
        if style == "mla_kv_a_proj":
            config: Any = base.config
            styles[pattern] = SharedKey(width=config.get_text_config().qk_rope_head_dim)
    return styles


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper."""
    get = getattr(model, "get_base_model", None)
    return model if get is None else get()


def placings(model: nn.Module, plan: Mapping[str, Style], num_ranks: int, named: Collection[str] = ()) -> list[Placing]:
    """Return how every module is shared; unplanned ones are held whole by each rank.

    Args:
        plan: The styles by pattern; see `find_plan`.
        named: The patterns that a user wrote, each of which must match.

    Raises:
        ConfigError: A pattern matches nothing, or the ranks cannot share a module's heads.
    """
    base = base_of(model)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    patterns = {pattern: re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")) for pattern in plan}
    placing_of: dict[nn.Module, Placing] = {}
    matches = set()
    for name, module in model.named_modules():
        name_in_base = name.removeprefix(prefix)
        pattern = next((pattern for pattern, regex in patterns.items() if regex.fullmatch(name_in_base)), None)
        if pattern is None:
            continue
        matches.add(pattern)
        for placing in _placings_in(name, module, plan[pattern]):
            placing_of[placing.module] = _checked(placing, model, num_ranks)
    of_modules = [pattern for pattern in named or plan if pattern.rpartition(".")[2] not in _OF_EXPERTS]
    unmatched = [pattern for pattern in of_modules if pattern not in matches]
    if unmatched and (named or not matches):
        raise ConfigError(
            f"Cannot use the plan for {type(base).__name__}.",
            f"It has no modules named {listed(unmatched, most=3)}.",
            "Use the names of model.named_modules(), with * for one part.",
        )
    return _agree([placing_of.get(module) or _unsplit(name, module) for name, module in model.named_modules()])


def install(found: list[Placing], ranks: TensorRanks, inner: TensorRanks, layers: Collection[nn.Module] = ()) -> None:
    """Place all parameters and install the styles. Mutates the modules.

    A parameter with several names stays one parameter.

    Args:
        inner: The same ranks in the layers, between which they may share the activations along the sequence.
    """
    replacements: dict[int, nn.Parameter] = {}
    modules = {placing.name: placing.module for placing in found}
    previous: set[nn.Module] = set()
    within = {module for layer in layers for module in layer.modules()}
    for placing in found:
        module_ranks = inner if placing.module in within else ranks
        parameters = {}
        for name, parameter in placing.module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                continue  # placed by the user
            if id(parameter) not in replacements:
                replacement = place(parameter, ranks.mesh, placing.dims.get(name))
                replacement.__dict__.update(vars(parameter))
                replacements[id(parameter)] = replacement
            parameters[name] = replacements[id(parameter)]
        if parameters or uncalled(placing.module):
            apply_style(placing.module, placing.style, module_ranks, parameters)
        if isinstance(placing.style, Colwise):
            owners = {placing.module, modules[placing.name.rpartition(".")[0]]} - previous
            previous |= owners
            for owner in owners:
                for name in _COUNTS.get(type(owner).__name__, ()):
                    setattr(owner, name, getattr(owner, name) // module_ranks.size)
        if placing.opens:
            if hasattr(placing.module, "base_layer"):
                # Its adapter drops parts of the whole input, and a module before it may have opened (queries, of keys).
                placing.module.register_forward_pre_hook(module_ranks.meet)
            placing.module.register_forward_hook(module_ranks.part)
        if placing.closes:
            placing.module.register_forward_hook(module_ranks.meet)


def _unsplit(name: str, module: nn.Module) -> Placing:
    return Placing(name=name, module=module, style=Style(), dims={})


def _placings_in(name: str, module: Any, style: Style) -> Iterator[Placing]:
    """Yield the module's own placing, or those of the parts inside adapters around it."""
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        for each in (module.original_module, *copies.values()):
            yield from _placings_in(name, each, style)
        return
    opens = isinstance(style, Colwise) and not style.gathers
    outer = {"opens": opens, "closes": isinstance(style, Rowwise)}
    base = getattr(module, "base_layer", None)
    if base is None:
        yield _placing(name, module, style, **outer)
        return
    adapters = dict(module.named_children())
    parts = [key for key, part in adapters.items() if key != "base_layer" and any(True for _ in part.parameters())]
    is_linear = isinstance(style, (Colwise, Rowwise)) and style.packed_in("weight") == 1
    if sorted(parts) != ["lora_A", "lora_B"] or not is_linear:
        raise ConfigError(
            f"Cannot share {name} among tensor ranks.",
            f"It is a {type(style).__name__} module with an adapter of {listed(parts, most=4)}.",
            "Use LoRA on linear layers, target other modules, or train without tensor ranks (strategy='fsdp').",
        )
    yield Placing(name=name, module=module, style=Style(), dims={}, **outer)
    yield _placing(f"{name}.base_layer", base, style)
    for key in module.lora_A:
        style_a, style_b = (Style(), replace(style)) if isinstance(style, Colwise) else (style, Style())
        yield _placing(f"{name}.lora_A.{key}", module.lora_A[key], style_a)
        yield _placing(f"{name}.lora_B.{key}", module.lora_B[key], style_b)


def _placing(name: str, module: nn.Module, style: Style, **outer: bool) -> Placing:
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    dims = style.dims(module)
    is_linear = isinstance(module, nn.Linear) or is_conv1d(module)
    looks_up = isinstance(module, nn.Embedding)
    fits = {Colwise: is_linear or looks_up, Rowwise: is_linear, Vocabulary: looks_up}
    if not fits.get(type(style), True) or not set(dims) - {"bias"} <= parameters.keys():
        raise ConfigError(
            f"Cannot share {name} as {type(style).__name__.lower()}.",
            f"It is a {type(module).__name__} with the parameters {listed([*parameters], most=4)}.",
            "Give it another style ('replicated'), or leave it out of the plan.",
        )
    return Placing(name=name, module=module, style=style, dims={key: dims.get(key) for key in parameters}, **outer)


def _checked(placing: Placing, model: nn.Module, num_ranks: int) -> Placing:
    """Return the placing if the ranks can share the module; vocabularies that they cannot share are held whole."""
    module, style = placing.module, placing.style
    sizes = {name: getattr(module, name).shape[dim] for name, dim in placing.dims.items() if dim is not None}
    packed = style.packed_in("weight")
    uneven = {name: size for name, size in sizes.items() if size % (num_ranks * style.packed_in(name))}
    if isinstance(style, Vocabulary) and getattr(module, "max_norm", None) is not None:
        uneven = sizes  # the norms of rows are changed in place
    if uneven and (isinstance(style, Vocabulary) or getattr(style, "gathers", False)):
        return Placing(name=placing.name, module=module, style=Style(), dims={})
    parent = model.get_submodule(placing.name.removesuffix(".base_layer").rpartition(".")[0])
    head = getattr(parent, "head_dim", None) if isinstance(style, Colwise) and not style.gathers else None
    rows = sizes.get("weight", 0) // packed
    # A layer with one output for each head has no rows of heads.
    if uneven or (isinstance(head, int) and rows % head == 0 and rows // num_ranks % head):
        width = f"a width of {next(iter(uneven.values()))}" if uneven else f"{sizes['weight'] // packed // head} heads"
        raise ConfigError(
            f"Cannot share {placing.name} among {num_ranks} tensor ranks.",
            f"It has {width}, which {num_ranks} does not divide.",
            "Use a tp_size that divides them (for attention: the number of key and value heads).",
        )
    return placing


def _agree(found: list[Placing]) -> list[Placing]:
    """Return placings in which all names of one parameter are placed alike: whole, where they differ."""
    dims: dict[int, set[int | None]] = {}
    for placing in found:
        for name, parameter in placing.module.named_parameters(recurse=False, remove_duplicate=False):
            dims.setdefault(id(parameter), set()).add(placing.dims.get(name))

    def differs(placing: Placing) -> bool:
        parameters = placing.module.named_parameters(recurse=False, remove_duplicate=False)
        return any(len(dims[id(parameter)]) > 1 for _, parameter in parameters)

    return [_unsplit(each.name, each.module) if differs(each) else each for each in found]
