"""What the loss of an evaluation is a mean over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kinds import NeedsCount, Shifts, batch_of, full_rows, make_model
from support.tiny import make_arguments

from hftrain import Trainer
from hftrain.trainer.proofs import findings


class ShiftsAndDivides(NeedsCount):
    """Predicts the next label, and divides by the count of all labels, as decoders did before transformers 5.10."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().loss(logits[:, :-1], labels[:, 1:], **kwargs)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_items_that_a_divided_loss_is_proved_to_have_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reversed: bool
) -> None:
    """Rule: what a loss can be comes in no order, which differs between processes."""

    def ordered(*args: Any, **kwargs: Any) -> list[Any]:
        return sorted(findings(*args, **kwargs) or (), reverse=is_reversed)

    monkeypatch.setattr("hftrain.trainer.evaluation_mean.findings", ordered)
    rows = full_rows()
    arguments = make_arguments(tmp_path, per_device_eval_batch_size=2)
    found = Trainer(make_model(ShiftsAndDivides), arguments, eval_dataset=rows).evaluate()["eval_loss"]
    assert found == pytest.approx(make_model(Shifts)(**batch_of(rows))["loss"].item(), rel=1e-6)
