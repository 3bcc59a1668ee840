"""The position of a run that goes on in another shape."""

from __future__ import annotations

from typing import Any

import pytest

from hftrain.checkpoint.geometry import BatchGrid, check_equal, check_resumable, convert_position, steps_left
from hftrain.core.errors import CheckpointError
from hftrain.core.progress import Progress


def grid(round: int | None, accumulation: int = 1, num_samples: int | None = 22) -> BatchGrid:
    num_batches = None if round is None or num_samples is None else -(-num_samples // round)
    return BatchGrid(round_size=round, accumulation=accumulation, num_batches=num_batches, num_samples=num_samples)


@pytest.mark.parametrize(
    ("position", "old", "new", "expected"),
    [
        ((1, 3, 0), grid(4), grid(4), (1, 3, 0)),
        ((1, 3, 1), grid(4), grid(4, 3), (1, 3, 1)),
        ((1, 4, 0), grid(2), grid(4), (1, 2, 0)),
        ((1, 3, 0), grid(2), grid(4), (1, 1, 2)),
        ((1, 1, 2), grid(4), grid(3), (1, 2, 0)),
        ((1, 0, 0), grid(2), grid(4), (1, 0, 0)),
        # Over: the last round was filled up, or samples were left out.
        ((1, 6, 0), grid(4), grid(3), (1, 8, 0)),
        ((1, 2, 0), BatchGrid(round_size=8, accumulation=1, num_batches=2, num_samples=22), grid(2), (1, 11, 0)),
        ((1, 6, 0), grid(4), grid(4), (1, 6, 0)),
        ((1, 2, 0), BatchGrid(round_size=11, accumulation=1, num_batches=None, num_samples=22), grid(4), (1, 6, 0)),
        # Without a length.
        ((0, 5, 0), grid(2, num_samples=None), grid(4, num_samples=None), (0, 2, 2)),
        ((0, 11, 0), grid(2), grid(4, num_samples=None), (1, 0, 0)),
        # Batches that nobody can count samples in; the shape is the same then.
        ((1, 3, 0), grid(None), grid(None), (1, 3, 0)),
        ((1, 3, 0), grid(None), grid(4), (1, 3, 0)),
    ],
)
def test_a_position_stays_the_same_in_samples(position: Any, old: BatchGrid, new: BatchGrid, expected: Any) -> None:
    epoch, used, offset = position
    moved = convert_position(Progress(step=9, epoch=epoch, micro_steps_in_epoch=used, offset_in_epoch=offset), old, new)
    assert (moved.epoch, moved.micro_steps_in_epoch, moved.offset_in_epoch) == expected
    assert moved.step == 9


@pytest.mark.parametrize(
    ("position", "first", "num_steps", "left"),
    [
        ((0, 0), 11, 12, 12),  # 11 batches, 3 to a step: 4 steps a pass
        ((0, 3), 11, 12, 11),
        ((0, 4), 11, 12, 11),  # 7 batches left: 3 steps, and 8
        ((2, 11), 11, 12, 0),
        ((2, 0), 11, 10, 2),  # ends within the third pass
        ((2, 2), 11, 10, 2),
        ((2, 7), 11, 10, 0),
        ((2, 0), 10, 12, 4),
        ((5, 0), 11, 12, 0),
    ],
)
def test_steps_left_end_where_the_plan_does(position: tuple[int, int], first: int, num_steps: int, left: int) -> None:
    progress = Progress(epoch=position[0], micro_steps_in_epoch=position[1])
    assert steps_left(progress, grid(2, 3), num_batches_first=first, num_steps=num_steps) == left


SAVED = {
    "world_size": 2, "batch_size": 4, "accumulation": 1, "round_size": 8, "samples": 22, "data_seed": 0,
    "drop_last": False, "precision": "fp32", "grouping": None, "seedable": True, "own_shares": False,
}  # fmt: skip


def check(change: dict[str, Any], saved: dict[str, Any] | None = None, *, is_within_epoch: bool = True) -> list[str]:
    return check_resumable({**SAVED, **(saved or {})}, {**SAVED, **change}, is_within_epoch=is_within_epoch, step=3)


def test_what_may_change_is_named() -> None:
    assert check({}) == []
    assert check({"world_size": 1, "batch_size": 8}) == ["world_size 2 -> 1", "batch_size 4 -> 8"]
    assert check({"accumulation": 2, "round_size": 4, "batch_size": 2}) == ["batch_size 4 -> 2", "accumulation 1 -> 2"]


def test_precision_may_change_where_the_weights_stay_what_they_are() -> None:
    kept = {"weights_dtype": "torch.float32"}
    assert check({"precision": "bf16", **kept}, kept) == ["precision fp32 -> bf16"]
    for saved, current in (("torch.float32", "torch.bfloat16"), (None, None), (None, "torch.float32")):
        with pytest.raises(CheckpointError, match="precision='bf16'"):
            check({"precision": "bf16", "weights_dtype": current}, {"weights_dtype": saved})


WITHIN = [
    ({"grouping": 8}, {}, "grouping"),
    ({"seedable": False}, {}, "seedable"),
    ({"seedable": False, "world_size": 1}, {"seedable": False}, "world_size"),
    ({"world_size": 1}, {"own_shares": True}, "world_size"),
    ({"world_size": 1, "own_shares": True}, {}, "world_size"),
    ({"batch_size": 2, "round_size": None}, {}, "batch_size"),
    ({"world_size": 1}, {"round_size": None}, "world_size"),
]


@pytest.mark.parametrize(("change", "saved", "named"), WITHIN)
def test_what_only_matters_within_an_epoch_is_refused_there(change: Any, saved: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=f"Cannot resume from step 3 with {named}="):
        check(change, saved)
    check(change, saved, is_within_epoch=False)


@pytest.mark.parametrize("change", [{"samples": 23}, {"data_seed": 1}, {"drop_last": True}, {"precision": "bf16"}])
def test_what_the_order_or_the_state_hangs_on_is_refused(change: dict[str, Any]) -> None:
    for is_within_epoch in (True, False):
        with pytest.raises(CheckpointError, match=next(iter(change))):
            check(change, is_within_epoch=is_within_epoch)


def test_check_geometry_accepts_the_same_and_names_both_values() -> None:
    check_equal(SAVED, {"world_size": 2, "batch_size": 4}, step=3)
    with pytest.raises(CheckpointError, match=r"batch_size=8 \(the checkpoint has 4\), optimizer='SGD' .*has None"):
        check_equal(SAVED, {"batch_size": 8, "optimizer": "SGD"}, step=3)


def test_a_value_that_was_not_recorded_is_refused() -> None:
    saved = {name: value for name, value in SAVED.items() if name not in ("precision", "grouping")}
    with pytest.raises(CheckpointError, match=r"precision='fp32' \(the checkpoint has None\)"):
        check_resumable(saved, SAVED, is_within_epoch=True, step=3)
