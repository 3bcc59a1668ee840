"""The documented functions on nested tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hftrain import TaskError, find_batch_size, nested_concat, nested_gather, torch_distributed_zero_first


@pytest.mark.parametrize("second", [[torch.ones(1)], "text", None])
def test_structures_that_differ_are_refused(second: Any) -> None:
    with pytest.raises(TaskError, match="Cannot join"):
        nested_concat(torch.ones(1), second)


def test_batch_size_is_none_without_rows() -> None:
    assert find_batch_size({"loss": torch.tensor(1.0), "rest": ()}) is None


def test_one_process_gathers_and_waits_for_nobody() -> None:
    tensors = (torch.ones(2),)
    assert nested_gather(tensors, "not_parallel") is tensors
    assert nested_gather(None, "distributed") is None
    with torch_distributed_zero_first(-1):
        pass
