"""Values with a meaning of their own that other libraries pass: a mark in a function's place, -1 for an interval."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, Trainer

# What TRL passes.
MARK: Any = "non-None value to disable scaling"


class Divides(Trainer):
    """Return a sum over the items of a micro-batch, divided by those of the whole step."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["x"])
        loss = nn.functional.cross_entropy(outputs[0], inputs["labels"], reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class DividesAndSaysSo(Divides):
    loss_is_scaled_for_ga = True


class MarksItself(Divides):
    """As TRL does with older versions of transformers: after the constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss_func = MARK


def check_split(folder: Path, kind: Any, num: int, *, num_rows: int, steps: int, **arguments: Any) -> None:
    """Train on `num` samples a step, whole with the model's own loss, and in parts of a third with another Trainer."""
    settings: dict[str, Any] = {"optim": "sgd", "lr_scheduler_type": "constant", "max_steps": steps, "max_grad_norm": 0}
    torch.manual_seed(0)
    whole, split, rows = Net(), Net(), make_rows(num_rows)
    split.load_state_dict(whole.state_dict())
    Trainer(whole, make_arguments(folder, per_device_train_batch_size=num, **settings), train_dataset=rows).train()
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **arguments}
    kind(split, make_arguments(folder, **settings), train_dataset=rows).train()
    for mine, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", [partial(Divides, compute_loss_func=MARK), DividesAndSaysSo, MarksItself])
def test_loss_that_is_marked_as_divided_is_not_divided_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    check_split(tmp_path, kind, 6, num_rows=18, steps=3)
    assert not caplog.records


def test_mark_without_an_own_loss_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows(), compute_loss_func=MARK)
    with pytest.raises(ConfigError, match="override compute_loss"):
        trainer.train()


class CountsSamples(Trainer):
    """Keep the collator from making tensors, as trainers do that generate while they train."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert isinstance(inputs, list)
        loss, logits = model(torch.stack([row["x"] for row in inputs]), torch.stack([row["labels"] for row in inputs]))
        return (loss, (logits,)) if return_outputs else loss


@pytest.mark.parametrize("options", [{}, {"auto_find_batch_size": True}])
def test_batches_that_are_lists_of_samples_are_weighed_by_their_samples(tmp_path: Path, options: Any) -> None:
    # Two and two and one.
    check_split(tmp_path, partial(CountsSamples, data_collator=list), 5, num_rows=5, steps=1, **options)


def test_batches_that_are_lists_of_samples_are_cut_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Full(CountsSamples):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if len(inputs) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            sizes.append(len(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = make_arguments(tmp_path, per_device_train_batch_size=4, max_steps=1, auto_find_batch_size=True)
    Full(Net(), arguments, data_collator=list, train_dataset=make_rows(4)).train()
    assert sizes[-2:] == [2, 2]


def test_loss_function_that_is_set_after_the_constructor_is_called(tmp_path: Path) -> None:
    calls: list[int] = []

    def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(len(labels))
        return nn.functional.cross_entropy(outputs[0], labels)

    trainer = Trainer(Net(), make_arguments(tmp_path, max_steps=1), train_dataset=make_rows())
    trainer.compute_loss_func = own_loss
    trainer.evaluate(make_rows(3))
    assert calls == [3]
    trainer.train()
    assert calls[-1] == 4
