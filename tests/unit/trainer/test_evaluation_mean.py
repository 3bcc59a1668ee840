"""What the loss of an evaluation is a mean over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kinds import NeedsCount, batch_of, full_rows, make_model
from support.tiny import make_arguments, train

from hftrain import Trainer


class ShiftsAndDivides(NeedsCount):
    """Predicts the next label, and divides by the count of all labels, as GPT-2 does."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().loss(logits[:, :-1], labels[:, 1:], **kwargs)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_loss_that_is_divided_by_its_count_is_the_same_in_training_and_evaluation(
    tmp_path: Path, size: int, is_mixed: bool
) -> None:
    """Rule: batches whose first label is masked give the mean over shifted labels, too; they overrule no other."""
    rows = full_rows()
    for row in rows[: 4 * is_mixed]:
        row["labels"][0] = -100
    batch = batch_of(rows)
    num = (batch["labels"] != -100).sum()
    expected = make_model(ShiftsAndDivides)(**batch, num_items_in_batch=num)["loss"].item()
    arguments = make_arguments(tmp_path, per_device_eval_batch_size=size)
    found = Trainer(make_model(ShiftsAndDivides), arguments, eval_dataset=rows).evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-9)
    trained = train(
        tmp_path, make_model(ShiftsAndDivides), train_dataset=rows, per_device_train_batch_size=2,
        gradient_accumulation_steps=4, max_steps=1, learning_rate=0.0, logging_steps=1,
    )  # fmt: skip
    assert trained.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)
