"""What a loss can be a mean over, and how many of these items a batch holds."""

from __future__ import annotations

import sys
from typing import Any

import torch

LABELS, SHIFTED, SAMPLES, SUM = "labels", "shifted_labels", "samples", "sum"
KINDS = (LABELS, SHIFTED, SAMPLES, SUM)
OWN_ITEMS = "items"  # what a task or a function of the user's own counts
IGNORED_LABEL = -100


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of labels that count, without synchronising; boolean labels are classes and all count."""
    # What is counted here also decides which kind of mean a loss is recognised as: see `trainer.loss_kinds`.
    flags = labels != IGNORED_LABEL
    return flags.count_nonzero() if flags.is_cpu else flags.sum()  # twice as fast, but XLA lacks it


def known_count(count: Any) -> Any:
    """Return a count as a number, unless reading it would wait for a device."""
    return count.item() if type(count) is torch.Tensor and count.is_cpu else count


def loss_shifts_labels(model: Any) -> bool:
    """Return whether a transformers model's loss predicts the next label: a decoder with its `ForCausalLMLoss`."""
    losses: Any = sys.modules.get("transformers.loss.loss_utils")
    loss_type = getattr(model, "loss_type", None)
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if losses is None or loss_type is None or is_encoder_decoder:
        return False
    return losses.LOSS_MAPPING.get(loss_type) is losses.ForCausalLMLoss


def counts_shifted_labels() -> bool:
    """Return whether the installed transformers leaves labels out of its item count that a loss shifts away."""
    version = getattr(sys.modules.get("transformers"), "__version__", "99.0")
    major, minor, *_ = version.split(".")
    return (int(major), int(minor)) >= (5, 10)
