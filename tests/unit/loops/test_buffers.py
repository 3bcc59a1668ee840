"""Arrays that grow, and what ranks gather of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hftrain.core.errors import TaskError
from hftrain.loops.gather import Kept, KeptBatches


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
