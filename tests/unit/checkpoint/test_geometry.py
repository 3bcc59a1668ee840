"""The position of a run that goes on in another shape."""

from __future__ import annotations

from typing import Any

import pytest

from hftrain.checkpoint.fitting import check_equal, check_resumable
from hftrain.core.errors import CheckpointError

SAVED = {
    "world_size": 2, "batch_size": 4, "accumulation": 1, "round_size": 8, "samples": 22, "data_seed": 0,
    "drop_last": False, "precision": "fp32", "grouping": None, "seedable": True, "own_shares": False,
}  # fmt: skip


def check(change: dict[str, Any], saved: dict[str, Any] | None = None, *, is_within_epoch: bool = True) -> list[str]:
    return check_resumable({**SAVED, **(saved or {})}, {**SAVED, **change}, is_within_epoch=is_within_epoch, step=3)


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


def test_check_geometry_accepts_the_same_and_names_both_values() -> None:
    check_equal(SAVED, {"world_size": 2, "batch_size": 4}, step=3)
    with pytest.raises(CheckpointError, match=r"batch_size=8 \(the checkpoint has 4\), optimizer='SGD' .*has None"):
        check_equal(SAVED, {"batch_size": 8, "optimizer": "SGD"}, step=3)


def test_a_value_that_was_not_recorded_is_refused() -> None:
    saved = {name: value for name, value in SAVED.items() if name not in ("precision", "grouping")}
    with pytest.raises(CheckpointError, match=r"precision='fp32' \(the checkpoint has None\)"):
        check_resumable(saved, SAVED, is_within_epoch=True, step=3)
