"""The documented rules that turn a model's outputs into a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.core.errors import TaskError
from hftrain.core.notes import describe
from hftrain.task.items import IGNORED_LABEL


def read_loss(outputs: Any, *, model_name: str, has_labels: bool = True) -> torch.Tensor:
    """Find the loss in a model's outputs: under ``"loss"`` in a mapping, first in a tuple, or the tensor itself."""
    loss = own_loss(outputs)
    if loss is None:
        hint = "" if has_labels else "; the batch has no labels, by which models compute it"
        remedy = "Return the loss there when labels are given, pass compute_loss_func, override compute_loss, "
        remedy += "or write a TaskModule."
        if not has_labels:
            remedy = "Add the labels to each sample, or name their column in label_names."
        raise TaskError(
            f"Cannot find the loss of {model_name}.",
            f"It returned {describe(outputs)}, with no scalar loss under 'loss' or in first place{hint}.",
            remedy,
        )
    return loss


def own_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss in a model's outputs, which an autoencoder also gives without labels; None if there is none."""
    if isinstance(outputs, (dict, Mapping)):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        loss = outputs[0] if outputs else None
    else:
        loss = outputs
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else None


def smoothed_loss(
    logits_BxC: torch.Tensor,
    labels_Bx: torch.Tensor,
    *,
    smoothing: float,
    shift: bool = False,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy against labels of which `smoothing` is spread evenly over all classes.

    Args:
        labels_Bx: Class numbers; -100 is ignored.
        smoothing: Share of the target that is spread, 0 to 1.
        shift: Compare position t's logits with label t + 1 (causal language models).
        num_items: Divide by this count instead of the number of labels that are not ignored.

    Shapes:
        B: batch. x: any further dimensions. C: classes.

    Source:
        Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7; the documented
        `label_smoothing_factor`.
    """
    if labels_Bx.is_floating_point():
        raise TaskError(
            "Cannot smooth the labels.",
            f"The labels are not class numbers but {labels_Bx.dtype}, of shape {tuple(labels_Bx.shape)}.",
            "Set label_smoothing_factor=0, or smooth them in a compute_loss_func.",
        )
    if shift:
        logits_BxC, labels_Bx = logits_BxC[..., :-1, :], labels_Bx[..., 1:]
    total = torch.nn.functional.cross_entropy(
        logits_BxC.reshape(-1, logits_BxC.shape[-1]).to(torch.promote_types(logits_BxC.dtype, torch.float32)),
        labels_Bx.reshape(-1),
        ignore_index=IGNORED_LABEL,
        label_smoothing=smoothing,
        reduction="sum",
    )
    return total / ((labels_Bx != IGNORED_LABEL).sum() if num_items is None else num_items)


@dataclass(frozen=True)
class LabelSmoother:
    """Compute the label-smoothed loss, for subclasses that compute the loss themselves.

    Args:
        epsilon: The smoothing factor: the probability mass spread over all classes.

    Source: the documented `label_smoothing_factor`.
    """

    epsilon: float = 0.1

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the smoothed loss of a model's outputs (logits under ``"logits"``, or first).

        It is the mean over the labels, or their sum divided by `num_items_in_batch`.
        """
        if isinstance(labels, Mapping):
            labels = labels["labels"]
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        options: Any = {"shift": shift_labels, "num_items": num_items_in_batch}
        return smoothed_loss(logits, labels, smoothing=self.epsilon, **options)
