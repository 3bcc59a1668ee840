"""Which checkpoints are older, and which are too many."""

from __future__ import annotations

import pytest

from hftrain.checkpoint.manifest import Manifest
from hftrain.checkpoint.rotation import commit_order, surplus


def test_checkpoints_are_ordered_by_commit_and_those_without_manifest_last():
    old, new = (Manifest(step=step, facts={"saved_at_s": at}) for step, at in ((8, 1.0), (4, 2.0)))
    orders = [commit_order(old, step=8), commit_order(new, step=4), commit_order(None, step=2)]
    assert orders == sorted(orders)
    assert commit_order(Manifest(step=3), step=3) < orders[0]
    assert commit_order(Manifest(step=3, facts={"saved_at_s": "now"}), step=3) > orders[1]


@pytest.mark.parametrize(
    ("protected", "limit", "expected"),
    [([5], 2, [1, 2, 3]), ([1, 5], 2, [2, 3, 4]), ([1, 5], 1, [2, 3, 4]), ([], 9, []), ([5], 4, [1])],
)
def test_surplus_is_the_oldest_that_nobody_protects(protected, limit, expected):
    assert list(surplus([1, 2, 3, 4, 5], protected=protected, limit=limit)) == expected
