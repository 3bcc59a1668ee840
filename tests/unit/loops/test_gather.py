"""Keeping predictions: batch by batch, padded, in the data's order over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.tiny import make_trainer
from torch import nn

from hftrain.core.errors import TaskError
from hftrain.extras.predictions.buffers import PADDING
from hftrain.extras.predictions.gather import RowCollector, restore_order

RunRanks = Callable[..., list[Any]]


class Alone:
    """One rank."""

    world_size = 1


def concatenate(batches: list[Any]) -> Any:
    """Keep batches on one rank."""
    kept = RowCollector()
    for batch in batches:
        kept.add(batch)
    return kept.joined(Alone(), is_interleaved=False)  # type: ignore[arg-type]


# -- one tree or many, against NumPy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_types_that_cannot_hold_the_padding_are_widened_where_it_is_needed(dtype: torch.dtype) -> None:
    even = concatenate([torch.ones(1, 2, dtype=dtype)] * 2)
    assert even.dtype == torch.empty(0, dtype=dtype).numpy().dtype
    uneven = concatenate([torch.ones(1, 2, dtype=dtype), torch.zeros(1, 3, dtype=dtype)])
    assert uneven.tolist() == [[1, 1, PADDING], [0, 0, 0]]


# -- keeping ---------------------------------------------------------------------------------------------------------


def test_arrays_and_numbers_are_kept_like_tensors() -> None:
    kept = RowCollector()
    for number in (1, 2):
        kept.add({"array": numpy.full((2, number), number), "number": float(number), "flag": True, "none": None})
    joined = kept.joined(Alone(), is_interleaved=False)
    assert list(joined) == ["array", "number", "flag"]
    assert joined["array"].tolist() == [[1, PADDING], [1, PADDING], [2, 2], [2, 2]]
    assert joined["number"].tolist() == [1.0, 2.0]
    assert joined["flag"].tolist() == [True, True]


@pytest.mark.parametrize("tree", ["text", (torch.ones(1), ["text"]), {"cache": object()}])
def test_what_cannot_be_kept_is_named(tree: Any) -> None:
    with pytest.raises(TaskError, match=r"They hold a (str|object), and only tensors, arrays and numbers"):
        RowCollector().add(tree)


# -- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("widths", [(2, 2), (2, 3), (3, 2)])
def test_ranks_agree_on_a_type(run_ranks: RunRanks, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    batches = [torch.ones(1, width).to(dtype) for width in widths]

    def join(group: Any) -> Any:
        kept = RowCollector()
        kept.add(batches[group.rank])
        return kept.joined(group, is_interleaved=False)

    one, other = run_ranks(join, 2)
    numpy.testing.assert_array_equal(one, other)
    numpy.testing.assert_array_equal(one, (concatenate(batches)))


def test_rows_go_back_to_their_samples_several_of_one_together() -> None:
    order = [2, 0, 1]
    one, several, other = numpy.array([2, 0, 1]), numpy.array([20, 21, 0, 1, 10, 11]), numpy.arange(4)
    found = restore_order({"one": one, "several": (several, several.tolist()), "other": other, "none": None}, order)
    assert found["one"].tolist() == [0, 1, 2]
    assert [list(rows) for rows in found["several"]] == [[0, 1, 10, 11, 20, 21]] * 2
    assert found["other"].tolist() == [0, 1, 2, 3]
    assert found["none"] is None


class OneBuffer(nn.Module):
    """Write the outputs of each batch into the same memory, as compiled graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.outputs = nn.Parameter(torch.ones(1)), torch.zeros(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            self.outputs.copy_(x * self.factor)
        return {"loss": self.factor.sum(), "logits": self.outputs}


def test_predictions_are_kept_before_a_model_reuses_their_memory(tmp_path: Path) -> None:
    rows = [{"x": torch.tensor([float(number)]), "labels": torch.zeros(1)} for number in range(16)]
    trainer = make_trainer(tmp_path, OneBuffer(), per_device_eval_batch_size=4)
    assert trainer.predict(rows).predictions.ravel().tolist() == [*range(16)]
