"""The documentation's examples, as written there: only the import lines name hftrain."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows
from torch import nn

from hftrain import Trainer


class Model(nn.Module):
    """A model as the examples expect it: outputs by name, with a config and a device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.config = SimpleNamespace(num_labels=3)
        self.device = torch.device("cpu")

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        *loss, logits = self.net(x, labels)
        return {"loss": loss[0], "logits": logits} if loss else {"logits": logits}


class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):  # type: ignore[no-untyped-def, override]
        labels = inputs.pop("labels")
        # forward pass
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # compute custom loss for 3 labels with different weights
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class OlderCustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):  # type: ignore[no-untyped-def, override]
        labels = inputs.get("labels")
        # forward pass
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # compute custom loss (suppose one has 3 labels with different weights)
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", [CustomTrainer, OlderCustomTrainer])
def test_weighted_loss_trains_evaluates_and_predicts(kind: type[Trainer], tmp_path: Path) -> None:
    args = make_arguments(tmp_path, num_train_epochs=10, eval_strategy="epoch", gradient_accumulation_steps=2)
    trainer = kind(Model(), args, train_dataset=make_rows(), eval_dataset=make_rows(5))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    assert trainer.predict(make_rows(3)).predictions.shape == (3, 3)
