"""The loss of causal language models, shared out: tensor ranks along the vocabulary, context ranks along the sequence.

No rank ever holds all logits of a batch. The loss, the mean over all labels, is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.strategies.mesh.moves import enter, leave
from hftrain.strategies.mesh.plans import base_of
from hftrain.strategies.mesh.styles import SHARES_LOSS

_IGNORED = -100


def find_head(model: nn.Module) -> nn.Linear:
    """Return the head of a causal language model of transformers whose loss can be shared.

    Raises:
        ConfigError: The model's loss is not the usual one, or its head is not a plain linear layer.
    """
    base: Any = base_of(model)
    head: Any = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    loss_function = getattr(base, "loss_function", None)
    if getattr(loss_function, "__name__", "") != "ForCausalLMLoss" or not isinstance(head, nn.Linear):
        raise ConfigError(
            f"Cannot use loss_parallel=True with {type(base).__name__}.",
            "It shares the usual loss of transformers' causal language models with a plain linear head.",
            "Leave loss_parallel out: the logits are then put together on every rank.",
        )
    return head


def share_loss(
    model: nn.Module, head: nn.Linear, *, vocabulary: DeviceMesh | None, sequence: DeviceMesh | None
) -> None:
    """Let the ranks share the loss of a model in training. Mutates the model.

    While it trains with labels, its outputs have no `logits`.

    Args:
        vocabulary: The ranks that have parts of the head's outputs, if any.
        sequence: The ranks that share each sequence, if any.
    """
    model.register_forward_pre_hook(partial(_before, head), with_kwargs=True)
    model.register_forward_hook(partial(_after, head))
    head.register_forward_pre_hook(partial(_own_positions, sequence), prepend=True)
    base: Any = base_of(model)
    base.loss_function = partial(_loss, base.loss_function, head, vocabulary, sequence)


def _before(head: nn.Module, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Remember the labels of a training step, each at the position that predicts it."""
    vars(head).pop(SHARES_LOSS, None)
    labels: Any = kwargs.get("labels")
    targets: Any = kwargs.get("shift_labels")
    if model.training and torch.is_grad_enabled() and (labels is not None or targets is not None):
        if targets is None:
            targets = F.pad(labels[..., 1:], (0, 1), value=_IGNORED)
        vars(head)[SHARES_LOSS] = {"goals": targets, "count": (targets != _IGNORED).sum()}


def _own_positions(sequence: DeviceMesh | None, head: nn.Module, args: tuple[Any, ...]) -> Any:
    step = vars(head).get(SHARES_LOSS)
    if step is None:
        return args
    hidden, targets = args[0], step["goals"]
    if hidden.shape[:-1] != targets.shape:
        reason = f"The head gets tokens of shape {list(hidden.shape[:-1])}, and labels of {list(targets.shape)}."
        raise StrategyError("Cannot share the loss over ranks.", reason, "Use loss_parallel=False.")
    if sequence is not None:
        rank, size = int(sequence.get_local_rank()), sequence.size()
        hidden, step["goals"] = hidden.tensor_split(size, 1)[rank], targets.tensor_split(size, 1)[rank]
    return (hidden, *args[1:])


def _loss(
    loss_function: Any,
    head: nn.Module,
    vocabulary: DeviceMesh | None,
    sequence: DeviceMesh | None,
    logits: torch.Tensor,
    *args: Any,
    num_items_in_batch: Any = None,
    **options: Any,
) -> Any:
    """Return the mean over all labels; in place of the model's `loss_function`."""
    step = vars(head).get(SHARES_LOSS)
    if step is None:
        return loss_function(logits, *args, num_items_in_batch=num_items_in_batch, **options)
    targets = step["goals"].to(logits.device)
    if options.get("ignore_index", _IGNORED) != _IGNORED or logits.shape[:-1] != targets.shape:
        reason = "The model changes the shape of its logits before the loss, or ignores another label."
        raise StrategyError("Cannot share the loss over ranks.", reason, "Use loss_parallel=False.")
    step["is_used"] = True
    losses = cross_entropies(logits.flatten(0, -2), targets.flatten(), vocabulary)
    total = losses.sum()
    if sequence is not None:  # every rank returns the whole loss, of which each has a copy
        total = enter(leave(total, sequence), sequence)
    count = step["count"] if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def cross_entropies(logits: torch.Tensor, goals: torch.Tensor, vocabulary: DeviceMesh | None) -> torch.Tensor:
    """Return the cross-entropy of each row, 0 for ignored ones.

    Args:
        logits: ``[rows, classes of this rank]``.
        goals: ``[rows]``, class numbers; -100 is ignored.
        vocabulary: The ranks that have the other classes, in order; None if there are none.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary is None:
        return F.cross_entropy(logits, goals, ignore_index=_IGNORED, reduction="none")
    maximum = logits.detach().amax(-1)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=vocabulary.get_group())
    num = logits.shape[-1]
    row = goals - int(vocabulary.get_local_rank()) * num
    is_outside = (row < 0) | (row >= num)
    shifted = logits - maximum.unsqueeze(-1)
    logit = shifted.gather(-1, row.masked_fill(is_outside, 0).unsqueeze(-1)).squeeze(-1).masked_fill(is_outside, 0)
    sums = leave(torch.stack([shifted.exp().sum(-1), logit]), vocabulary)
    return (sums[0].log() - sums[1]).masked_fill(goals == _IGNORED, 0)


def _after(head: nn.Module, model: nn.Module, args: Any, outputs: Any) -> Any:
    """Take the parts of the logits out of the outputs."""
    step = vars(head).pop(SHARES_LOSS, None)
    if step is None:
        return outputs
    if "is_used" not in step or not isinstance(outputs, Mapping):
        reason = "The model does not compute its loss by its head and its loss_function, or returns a tuple."
        raise StrategyError("Cannot share the loss over ranks.", reason, "Use loss_parallel=False.")
    return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
