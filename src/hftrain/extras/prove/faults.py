"""Faults that are planted to see whether a script's proof would notice them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hftrain.core.tree import batch_size_of, map_tensors


def _leave_out(batch: Any, number: int, last: int) -> Any:
    return None if number == last and last > 1 else batch


def _shift_labels(batch: Any, number: int, last: int) -> Any:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return batch if labels is None else {**batch, "labels": labels.roll(1, -1)}


def _share_mask(batch: Any, number: int, last: int) -> Any:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return batch if mask is None else {**batch, "attention_mask": mask[:1].expand_as(mask).contiguous()}


def _repeat_sample(batch: Any, number: int, last: int) -> Any:
    size = batch_size_of(batch) or 0

    def repeat(each: torch.Tensor) -> torch.Tensor:
        return torch.cat([each[:1], each[:1], each[2:]]) if each.dim() and len(each) == size else each

    return map_tensors(batch, repeat) if size > 1 else batch


def untie(model: Any) -> None:
    """Give the second name of the first shared parameter a copy of its own."""
    seen = set()
    for name, each in model.named_parameters(remove_duplicate=False):
        if each in seen:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(each.detach().clone()))
            if hasattr(model, "config"):
                model.config.tie_word_embeddings = False
            return
        seen.add(each)


UNTIED = "tied weights that are untied"
# (micro-batch, its number in the step from 1, how many there are) -> the faulty one; None leaves it out.
FAULTS: dict[str, Callable[[Any, int, int], Any]] = {
    "a process left out of the mean": _leave_out,
    "labels shifted once more": _shift_labels,
    "the mask of one sample for all": _share_mask,
    "a sample read twice": _repeat_sample,
    UNTIED: lambda batch, number, last: batch,
}
