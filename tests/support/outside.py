"""A Trainer whose loss has weights of its own, which its optimizer trains and its model does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hftrain import Trainer


class Heads(nn.Module):
    """A loss over one of two layers, by the batch's first number; the third is in use for none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, logits: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers[int(x[0, 0] > 0)](logits), labels)


class OwnLoss(Trainer):
    """Trains the weights of its loss in a group of their own, unless they are added later."""

    def __init__(self, *args: Any, heads: nn.Module, trains_heads: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heads = heads
        self.trained = [self.model, heads] if trains_heads else [self.model]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        groups = [{"params": list(part.parameters())} for part in self.trained]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        (logits,) = model(x=inputs["x"])
        loss = self.heads(logits, **inputs)
        return (loss, (logits,)) if return_outputs else loss
