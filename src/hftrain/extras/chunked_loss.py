"""The cross-entropy of large vocabularies, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError, TaskError

IGNORED_LABEL = -100
_REMEDY = "Leave the callback out, or call hftrain.chunked_cross_entropy in the forward of a model of your own."


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    reduction: str = "mean",
    chunk_size: int = 256,
) -> torch.Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias), labels)`` with the logits of `chunk_size` tokens at a time.

    The backward pass computes them again. Loss and gradients are those of the plain loss up to rounding. Call it inside
    the model's `forward`, so that DDP and FSDP see the weight being used, and declare what the loss is a mean over.

    Args:
        hidden: ``(..., width)``.
        weight: ``(classes, width)``.
        labels: ``(...)``, class numbers; -100 is ignored.
        bias: ``(classes,)`` or None.
        reduction: ``"mean"`` over the labels that are not ignored, or ``"sum"``.
        chunk_size: Tokens at a time.

    Returns:
        A 0-d tensor, in float32 at least.
    """
    chunks, targets = torch.split(hidden.flatten(0, -2), chunk_size), torch.split(labels.flatten(), chunk_size)
    chunk_loss = partial(checkpoint, _sum, weight, bias, use_reentrant=False, preserve_rng_state=False)
    total = torch.stack([chunk_loss(chunk, target) for chunk, target in zip(chunks, targets, strict=True)]).sum()
    return total if reduction == "sum" else total / (labels != IGNORED_LABEL).sum()


def _sum(weight: torch.Tensor, bias: torch.Tensor | None, chunk: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = F.linear(chunk, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, target, ignore_index=IGNORED_LABEL, reduction="sum")


class ChunkedCrossEntropy(TrainerCallback):
    """Train a causal language model of transformers without ever holding all logits.

    Losses and gradients are those of the model's own loss up to rounding. While the model trains, its outputs have no
    `logits`; evaluations and predictions run as they do without this callback. After the training the model is as it
    was. For other models, call `chunked_cross_entropy` in their `forward`.

    Args:
        chunk_size: Tokens whose logits are held at a time.

    Raises:
        ConfigError: The model's head is not a plain `nn.Linear`, its loss is not the usual one of causal language
            models, or the strategy runs copies or stages of it.
        TaskError: The first forward pass shows that the loss is not computed from the labels and the head's output.

    Example:
        >>> chunked = ChunkedCrossEntropy(chunk_size=512)  # Trainer(..., callbacks=[chunked])
    """

    def __init__(self, *, chunk_size: int = 256) -> None:
        self.chunk_size = chunk_size
        self._undo: list[Callable[[], Any]] = []

    def wrap_stepper(self, stepper: Any, *, model: nn.Module, strategy: Any, **_: Any) -> Any:
        """Return the calls of a step as they are, and give the model its loss."""
        self.close_run()
        base: Any = getattr(model, "get_base_model", lambda: model)()  # inside adapters
        head: Any = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        loss, reason = getattr(base, "loss_function", None), ""
        if getattr(loss, "__name__", "") != "ForCausalLMLoss" or base.config.is_encoder_decoder:
            reason = "Its loss is not the usual one of transformers' causal language models."
        elif getattr(type(head), "forward", None) is not nn.Linear.forward:
            reason = f"Its head is a {type(head).__name__}, not a plain nn.Linear."
        elif strategy.name == "data_parallel":
            reason = "strategy='data_parallel' runs copies of it; start one process per GPU instead."
        elif strategy.sizes.get("pp", 1) > 1:
            reason = "Only the last stage of a pipeline has its head and its labels; use pp_size=1."
        elif strategy.sizes.get("tp", 1) > 1 or getattr(strategy, "loss_parallel", False):
            reason = "Ranks share its head or its tokens; MeshStrategy(loss_parallel=True) alone saves the logits, too."
        if reason:
            raise ConfigError(f"Cannot use ChunkedCrossEntropy with {type(base).__name__}.", reason, _REMEDY)
        step: dict[str, Any] = {}  # what these four hand to each other in one forward pass
        base.loss_function = partial(_mean_loss, loss, step)
        head.forward = partial(_head_forward, head, step, self.chunk_size)
        before = model.register_forward_pre_hook(partial(_begin_forward, step), with_kwargs=True)
        after = model.register_forward_hook(partial(_end_forward, step))
        replaced = (partial(delattr, base, "_loss_function"), partial(delattr, head, "forward"))
        self._undo = [before.remove, after.remove, *replaced]
        return stepper

    def close_run(self) -> None:
        """Give the model its own loss back."""
        while self._undo:
            self._undo.pop()()


def _refuse(reason: str) -> TaskError:
    return TaskError("Cannot compute this loss with ChunkedCrossEntropy.", reason, _REMEDY)


def _begin_forward(step: dict[str, Any], model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Give the head the labels of a training step."""
    step.clear()
    if model.training and torch.is_grad_enabled():
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if labels is None:
            raise _refuse(
                "The model is not given labels: label_smoothing_factor, compute_loss_func or the step has them."
            )
        step["labels"] = F.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL) if shifted is None else shifted


def _head_forward(head: Any, step: dict[str, Any], chunk_size: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits, or in a training step the sum of the losses."""
    if "labels" not in step:
        return F.linear(hidden, head.weight, head.bias)
    labels, tokens = step["labels"].to(hidden.device), hidden.shape[:-1]
    if tokens != labels.shape:
        raise _refuse(f"The head gets tokens of shape {tuple(tokens)}, and labels of {tuple(labels.shape)}.")
    options: Any = {"bias": head.bias, "reduction": "sum", "chunk_size": chunk_size}
    step["sum"] = chunked_cross_entropy(hidden, head.weight, labels, **options)
    step["count"] = (labels != IGNORED_LABEL).sum()
    return step["sum"]  # type: ignore[no-any-return]


def _mean_loss(plain: Any, step: Any, logits: Any, *args: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
    """Return the mean of the losses that the head computed; in place of the model's `loss_function`."""
    if "labels" not in step:
        return plain(logits, *args, num_items_in_batch=num_items_in_batch, **options)
    if logits is not step.get("sum") or options.get("ignore_index", IGNORED_LABEL) != IGNORED_LABEL:
        raise _refuse("The model scales or caps its logits (as by final_logit_softcapping), or ignores another label.")
    step["is_used"] = True
    count = step["count"] if num_items_in_batch is None else num_items_in_batch
    return logits / (count.to(logits.device) if isinstance(count, torch.Tensor) else count)


def _end_forward(step: dict[str, Any], model: nn.Module, args: Any, outputs: Any) -> Any:
    """Take the sum of the losses out of the outputs, which would hold it as their logits."""
    has_labels, is_used = "labels" in step, "is_used" in step
    step.clear()
    if not has_labels:
        return outputs
    if not is_used or not isinstance(outputs, Mapping):
        raise _refuse("The model does not compute its loss by its head and its loss_function, or returns a tuple.")
    return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
