"""Arrays that grow, and what ranks gather of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from hftrain.core.errors import TaskError
from hftrain.extras.predictions.buffers import PADDING, Rows
from hftrain.extras.predictions.gather import Kept, KeptBatches


@pytest.mark.parametrize("num_expected", [0, 3, 20, 500])
def test_rows_are_those_that_came(num_expected: int) -> None:
    rng = random.Random(0)
    batches = [torch.randn(rng.randint(0, 5), rng.randint(1, 4)) for _ in range(12)]
    rows = Rows(num_expected=num_expected)
    for batch in batches:
        rows.append(batch)
    width = max(batch.shape[1] for batch in batches)
    expected = numpy.concatenate([
        numpy.pad(batch.numpy(), ((0, 0), (0, width - batch.shape[1])), constant_values=PADDING) for batch in batches
    ])  # fmt: skip
    numpy.testing.assert_array_equal(rows.array(), expected)


def test_space_is_taken_once_where_the_number_is_known() -> None:
    rows = Rows(num_expected=10)
    rows.append(torch.zeros(4, 3))
    before = rows.array().ctypes.data
    rows.append(torch.zeros(6, 3))
    assert rows.array().ctypes.data == before


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3, 1)), ((2,), (2, 1))])
def test_other_number_of_dimensions_is_named(shapes: tuple[tuple[int, ...], ...]) -> None:
    kept = Kept()
    kept.add(torch.ones(shapes[0]))
    with pytest.raises(TaskError, match=r"number of dimensions.*eval_do_concat_batches=False.*shapes="):
        kept.add(torch.ones(shapes[1]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        ({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}),
        ((torch.ones(1),), (torch.ones(1), torch.ones(1))),
        (torch.ones(1), (torch.ones(1),)),
    ],
)
def test_other_structure_is_named(first: Any, second: Any) -> None:
    kept = Kept()
    kept.add(first)
    with pytest.raises(TaskError, match=r"several batches .* differ in their keys.*structures="):
        kept.add(second)
    batches = KeptBatches()
    batches.add(first)
    batches.add(second)


@pytest.mark.parametrize("trees", [(torch.ones(1), {"a": torch.ones(1)}), (torch.ones(1, 2), torch.ones(1))])
def test_ranks_that_cannot_be_joined_all_say_so(run_ranks: Callable[..., list[Any]], trees: tuple[Any, Any]) -> None:
    def join(group: Any) -> str:
        kept = Kept()
        kept.add(trees[group.rank])
        with pytest.raises(TaskError) as caught:
            kept.joined(group, is_interleaved=False)
        return str(caught.value)

    assert all("differ in their" in said for said in run_ranks(join, 2))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_batches_of_all_ranks_stand_in_the_datas_order(
    run_ranks: Callable[..., list[Any]], is_interleaved: bool
) -> None:
    batches = [(torch.arange(n), {"x": torch.ones(n, n)}) for n in (3, 1, 2, 4)]
    shares = [batches[::3], batches[1::3], batches[2::3]] if is_interleaved else [batches[:3], batches[3:], []]

    def join(group: Any) -> Any:
        kept = KeptBatches(moves_every=2)
        for batch in shares[group.rank]:
            kept.add(batch)
        return kept.joined(group, is_interleaved=is_interleaved)

    for joined in run_ranks(join, 3):
        assert [(first.tolist(), rest["x"].shape) for first, rest in joined] == [
            (list(range(n)), (n, n)) for n in (3, 1, 2, 4)
        ]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("per_sample", [1, 2])
def test_ranks_gather_piece_by_piece(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, num_ranks: int, per_sample: int
) -> None:
    monkeypatch.setattr("hftrain.extras.predictions.gather._CHUNK_BYTES", 64)
    data = torch.arange(41 * per_sample * 3).reshape(41 * per_sample, 3)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(0)).tolist()

    def join(group: Any) -> Any:
        kept = Kept()
        for start in range(5 * group.rank, 41, 5 * group.world_size):
            kept.add(data.reshape(41, -1)[order[start : start + 5]].reshape(-1, 3))
        return kept.joined(group, is_interleaved=True, order=order)

    for joined in run_ranks(join, num_ranks):
        numpy.testing.assert_array_equal(joined, data.numpy())
