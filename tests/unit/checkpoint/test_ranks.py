"""What differs by process, for another number of processes."""

from __future__ import annotations

import torch

from hftrain.checkpoint.ranks import share_out


def test_windows_are_merged_and_random_numbers_shared_out() -> None:
    states = [
        {
            "cpu": rank,
            "loss_window": {
                "sum": torch.tensor(2.0 + rank),
                "pending": [torch.tensor(1.0 * rank)],
                "num_finite": 2 * rank,
                "num_steps": 3,
            },
            "log_window": {"sums": {"a": 1.0 + rank}, "counts": {"a": 1}} if rank else {},
        }
        for rank in range(2)
    ]
    first, third = share_out(states, rank=0), share_out(states, rank=2)
    assert (first["cpu"], third["cpu"]) == (0, 1)
    assert first["loss_window"] == {
        "sum": torch.tensor(2.5), "pending": [torch.tensor(0.5)], "num_finite": 1.0, "num_steps": 3,
    }  # fmt: skip
    assert (first["log_window"], third["log_window"]) == ({"sums": {"a": 2.0}, "counts": {"a": 1}}, {})
    empty = {"sum": None, "pending": [], "num_finite": 0}
    assert share_out([{"loss_window": empty}] * 2, rank=0) == {"loss_window": empty}
