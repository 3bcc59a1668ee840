"""Which checkpoints are older, and which are too many."""

from __future__ import annotations

from pathlib import Path

import pytest

from hftrain.checkpoint.manifest import Manifest
from hftrain.checkpoint.rotation import LocalCheckpoints, commit_order, finite_of


def test_checkpoints_are_ordered_by_number_then_by_time_and_those_without_manifest_come_last():
    facts = [
        {},
        {"saved_at_s": 1.0},
        {"saved_at_s": 9.0},
        {"saved_at_s": 8.0, "commit_number": 1},
        {"saved_at_s": 0.0, "commit_number": 2},
    ]
    orders = [commit_order(f"checkpoint-{9 - i}", Manifest(step=9 - i, facts=each)) for i, each in enumerate(facts)]
    orders.append(commit_order("checkpoint-0", None))
    assert orders == sorted(orders)
    assert len({*orders}) == len(orders)


class Counted(LocalCheckpoints):
    def __init__(self) -> None:
        super().__init__(Path("out"))
        self.listed, self.reads = ["checkpoint-1", "checkpoint-2"], []

    def names(self) -> list[str]:
        return self.listed

    def read(self, name: str) -> Manifest | None:
        self.reads.append(name)
        step = int(name.partition("-")[2])
        return None if step == 3 else Manifest(step=step, facts={"commit_number": 9 - step}, files={"a": {}})


def test_manifests_are_read_once_and_forgotten_with_their_checkpoints():
    checkpoints = Counted()
    checkpoints.note("checkpoint-2", Manifest(step=2, facts={"commit_number": 8}, files={"a": {}}))
    assert list(checkpoints.manifests()) == ["checkpoint-1", "checkpoint-2"]
    checkpoints.listed += ["checkpoint-3", "checkpoint-4"]
    assert list(checkpoints.manifests()) == ["checkpoint-4", "checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert checkpoints.reads == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    checkpoints.note("checkpoint-4", None)
    assert not any(each.files for each in checkpoints.manifests().values() if each)
    assert checkpoints.reads[3:] == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({}, True), ({"is_finite": True}, True), ({"is_finite": False}, False), ({"only_model": True}, False)],
)
def test_a_run_goes_back_to_its_own_complete_finite_checkpoints(facts, expected):
    manifest = Manifest(step=1, facts={"run_id": "a", **facts})
    assert finite_of("a")(manifest) == expected
    assert not finite_of("b")(manifest)
