"""Muon: orthogonalised momentum for hidden matrices, AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer, adamw

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.log import get_logger
from hftrain.core.parameters import block_of, local_part
from hftrain.optim.low_rank import find_targets
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, read_options

logger = get_logger(__name__)

_Tensors = list[torch.Tensor]

# The quintic that raises small singular values fastest, and the smallest norm that a matrix is divided by.
_POLYNOMIAL, _SMALLEST = (3.4445, -4.7750, 2.0315), 1e-7
_RATES = {"original": lambda a, b: math.sqrt(max(1, a / b)), "match_rms_adamw": lambda a, b: 0.2 * math.sqrt(max(a, b))}
_OPTIONS = {
    **{"muon_lr": float, "muon_weight_decay": float, "momentum": float, "nesterov": bool, "ns_steps": int},
    "adjust_lr_fn": str,
}


class Muon(Optimizer):
    """torch's Muon for the hidden matrices and its AdamW for the rest, as one optimizer with one state.

    Under FSDP (strategy ``"fsdp"``), each matrix has an owner that gets all its rows, orthogonalises them and sends
    them back: two exchanges per step in bfloat16, with the bits of one process. With DDP every process does it all, as
    do those of a mesh that splits matrices in other ways: each is put together once per step, in bfloat16.

    Args:
        params: Parameters or groups, as for every optimizer.
        targets: Those of them to orthogonalise, of shape ``[rows, columns]``; they become groups of their own, with
            ``"use_muon": True``.
        betas, eps: AdamW's.
        weight_decay: Of groups that name none.
        muon_lr: The rate of the matrices, which follows the same schedule; None is `lr`.
        muon_weight_decay: The decay of the matrices; None is that of their group.
        momentum: The averaging factor of the matrices' gradients.
        nesterov: Whether to add the gradient to the average once more.
        ns_steps: Steps of the Newton-Schulz iteration.
        adjust_lr_fn: torch's name of the factor of the rate of an [a, b] matrix: ``"match_rms_adamw"`` is
            0.2 sqrt(max(a, b)), with which AdamW's rate suits both; ``"original"`` is sqrt(max(1, a / b)).

    Raises:
        ConfigError: An option has no such value, or a target is not a matrix.
        StrategyError: The strategy has flattened the matrices.

    Source: Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al., 2025,
    arXiv 2502.16982; `torch.optim.Muon`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> optimizer = Muon(model.parameters(), targets=[model[0].weight], lr=1e-3, muon_lr=0.02)
        >>> [(group["use_muon"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
        [(False, 0.001, 3), (True, 0.02, 1)]
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        targets: Iterable[torch.Tensor] = (),
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        muon_weight_decay: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        matrices = list(targets)
        is_known = adjust_lr_fn in _RATES and 1 <= ns_steps < 100 and 0 <= momentum < 1
        if not is_known or any(matrix.dim() != 2 for matrix in matrices):
            raise ConfigError(
                f"Cannot use Muon with momentum={momentum}, ns_steps={ns_steps}, adjust_lr_fn={adjust_lr_fn!r} and "
                f"targets of {sorted({matrix.dim() for matrix in matrices})} dimensions.",
                f"Momentum is in [0, 1), steps are 1 to 99, functions {', '.join(_RATES)}, and targets matrices.",
                "Correct the value.",
            )
        target_ids = set(map(id, matrices))
        muon_settings = {"use_muon": True} if muon_lr is None else {"use_muon": True, "lr": muon_lr}
        muon_settings |= {} if muon_weight_decay is None else {"weight_decay": muon_weight_decay}
        groups: list[dict[str, Any]] = []
        parameters = list(params)
        for group in parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]:
            members = list(group["params"])
            groups.append({**group, "params": [p for p in members if id(p) not in target_ids]})
            groups.append({**group, "params": [p for p in members if id(p) in target_ids], **muon_settings})
        if sum(len(group["params"]) for group in groups[1::2]) < len(target_ids):
            raise ConfigError("Cannot use Muon.", "Some targets are not in params.", "Pass model.parameters().")
        # AdamW's first, since the first group's rate is the one that is logged.
        groups = sorted((group for group in groups if group["params"]), key=lambda group: "use_muon" in group)
        defaults = {
            **{"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "use_muon": False},
            **{"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn},
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters. Collective if matrices are split over processes."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                (self._step_matrices if group["use_muon"] else self._step_others)(group, trained)
        return loss

    def _step_matrices(self, group: dict[str, Any], matrices: list[torch.Tensor]) -> None:
        """Average the gradients of this process's rows, orthogonalise the averages, and step by them."""
        if any(matrix.dim() != 2 for matrix in matrices):
            raise _flattened_error("It has flattened the matrices.")
        momentum, rate, updates = group["momentum"], float(group["lr"]), []
        for matrix in matrices:
            gradient, state = matrix.grad, self.state[matrix]
            assert gradient is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            gradient, average = local_part(gradient), local_part(state["momentum_buffer"])
            average.lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(average, momentum) if group["nesterov"] else average)
        for matrix, update in zip(matrices, _orthogonalise_all(matrices, updates, group["ns_steps"]), strict=True):
            local = local_part(matrix)
            local.mul_(1 - rate * group["weight_decay"])
            local.add_(update, alpha=-rate * _RATES[group["adjust_lr_fn"]](*matrix.shape))

    def _step_others(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter].update(step=torch.tensor(0.0), **zeros)
        states, (beta1, beta2) = [self.state[parameter] for parameter in parameters], group["betas"]
        update: Any = adamw.adamw
        update(
            parameters,
            [parameter.grad for parameter in parameters],
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            [],
            [state["step"] for state in states],
            **{"beta1": beta1, "beta2": beta2, **{name: group[name] for name in ("lr", "weight_decay", "eps")}},
            **{"amsgrad": False, "maximize": False},
        )


def orthogonalise(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return about U V^T of a matrix U S V^T, in bfloat16, by Newton-Schulz steps; singular values end near 1."""
    a, b, c = _POLYNOMIAL
    is_tall = matrix.size(0) > matrix.size(1)
    result = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    result = result / result.norm().clamp(min=_SMALLEST)
    for _ in range(num_steps):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.T if is_tall else result


def _orthogonalise_all(matrices: Sequence[torch.Tensor], updates: _Tensors, num_steps: int) -> _Tensors:
    """Return the matrices' orthogonalised updates, or this process's rows of them. Collective for split matrices."""
    results: list[Any] = [None] * len(updates)
    sharded: dict[Any, list[int]] = {}
    for index, (matrix, update) in enumerate(zip(matrices, updates, strict=True)):
        placements = matrix.placements if isinstance(matrix, DTensor) else ()
        dims = [number for number, placement in enumerate(placements) if not placement.is_replicate()]
        if not dims:
            results[index] = orthogonalise(update, num_steps)
        elif [placements[number] for number in dims] != [Shard(0)]:
            results[index] = _orthogonalise_whole(matrix, update, num_steps)
        else:
            sharded.setdefault((matrix.device_mesh, dims[0]), []).append(index)  # type: ignore[attr-defined]
    for (mesh, dim), indices in sharded.items():
        shapes = [matrices[index].shape for index in indices]
        parts = _orthogonalise_by_owner([updates[index] for index in indices], shapes, mesh.get_group(dim), num_steps)
        for index, part in zip(indices, parts, strict=True):
            results[index] = part
    return results


def _orthogonalise_whole(matrix: Any, part: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Put a matrix together on every process, and return this process's block of the result. Collective."""
    layout = {"shape": matrix.shape, "stride": matrix.stride()}
    whole: Any = DTensor.from_local(part.bfloat16(), matrix.device_mesh, matrix.placements, run_check=False, **layout)
    (row, column), (height, width) = block_of(matrix)
    return orthogonalise(whole.full_tensor(), num_steps)[row : row + height, column : column + width]


def _orthogonalise_by_owner(parts: _Tensors, shapes: list[torch.Size], group: Any, num_steps: int) -> _Tensors:
    """Send each matrix's rows to its owner, and get this process's rows of the result; all in two exchanges."""
    world_size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    by_owner = [range(len(parts))[owner::world_size] for owner in range(world_size)]
    own, in_order = by_owner[rank], [index for indices in by_owner for index in indices]
    heights = [_chunk_heights(num_rows, world_size) for num_rows, _ in shapes]
    num_sent = [sum(parts[index].numel() for index in indices) for indices in by_owner]
    sizes = [[heights[index][sender] * shapes[index][1] for index in own] for sender in range(world_size)]
    num_received = list(map(sum, sizes))
    rows = _exchange([parts[index] for index in in_order], num_sent, num_received, group)
    pieces = iter(torch.split(rows, [*chain.from_iterable(sizes)]))
    by_sender = [[next(pieces).view(-1, shapes[index][1]) for index in own] for _ in range(world_size)]
    whole = [orthogonalise(torch.cat(chunks), num_steps) for chunks in zip(*by_sender, strict=True)]
    chunks = [torch.split(matrix, heights[index]) for index, matrix in zip(own, whole, strict=True)]
    by_receiver = [matrix[receiver] for receiver in range(world_size) for matrix in chunks]
    rows = _exchange([rows.new_empty(0), *by_receiver], num_received, num_sent, group)  # it may own none
    results = dict(zip(in_order, torch.split(rows, [parts[index].numel() for index in in_order]), strict=True))
    return [results[index].view(part.shape) for index, part in enumerate(parts)]


def _chunk_heights(num_rows: int, num_chunks: int) -> list[int]:
    """Return the heights of `torch.chunk`'s pieces, as FSDP splits: equal ones, then a smaller one, then none."""
    height = -(-num_rows // num_chunks)
    return [max(0, min(height, num_rows - number * height)) for number in range(num_chunks)]


def _exchange(pieces: _Tensors, num_sent: list[int], num_received: list[int], group: Any) -> torch.Tensor:
    """Send `num_sent[r]` elements of the pieces to process r, return the `num_received[r]` of each, in bfloat16."""
    packed = torch.cat([piece.bfloat16().reshape(-1) for piece in pieces])
    received = packed.new_empty(sum(num_received))
    torch.distributed.all_to_all_single(received, packed, num_received, num_sent, group=group)
    return received


def _flattened_error(reason: str) -> StrategyError:
    return StrategyError(
        "Cannot use Muon with this strategy.",
        f"{reason} An orthogonalised part is not a part of the orthogonalised matrix.",
        "Use strategy='ddp' or 'fsdp' (FSDP2), or another optimizer.",
    )


def muon(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return Muon with the model's hidden matrices, or the linear modules of `optim_target_modules`."""
    options = read_options(config, _OPTIONS)
    if model is None:
        raise ConfigError("Cannot use optim='muon'.", "It looks for hidden matrices in the model.", "Pass the model.")
    targets = find_hidden(model) if config.target_modules is None else find_targets(model, config)
    target_ids = {id(matrix) for matrix in targets}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    logger.info(
        "optim='muon' orthogonalises %s. AdamW trains %s.",
        ", ".join(name for name, p in named if id(p) in target_ids),
        ", ".join(name for name, p in named if id(p) not in target_ids) or "nothing else",
    )
    settings = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    return Muon, {**settings, **options, "targets": targets}


def find_hidden(model: nn.Module) -> list[nn.Parameter]:
    """List the trainable matrices between the embeddings and the output layer, in model order.

    They are the parameters of two dimensions whose name ends in ``weight``, except those of `nn.Embedding` (also if
    another module shares them) and of the output layer: what ``model.get_output_embeddings()`` returns, or else the
    last `nn.Linear` of the model.

    Raises:
        ConfigError: There are none.
        StrategyError: The strategy has flattened them.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if any(m.weight.requires_grad and m.weight.dim() != 2 for m in linear):
        raise _flattened_error("It has flattened the matrices.")
    try:
        output = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        output = None
    outer_layers: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    outer_layers += linear[-1:] if output is None else [output]
    outer = {id(parameter) for layer in outer_layers for parameter in layer.parameters()}
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("weight") and parameter.dim() == 2 and parameter.requires_grad and id(parameter) not in outer
    ]
    if not matrices:
        raise ConfigError(
            "Cannot use optim='muon'.",
            "The model has no trainable matrix between its embeddings and its output layer.",
            "Name the linear modules to orthogonalise in optim_target_modules, or use another optimizer.",
        )
    return matrices
