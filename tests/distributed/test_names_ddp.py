"""The documented functions between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hftrain import distributed_concat, nested_gather, torch_distributed_zero_first, total_processes_number

pytestmark = pytest.mark.distributed


def exchange() -> list[Any]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    rows = {"a": [torch.tensor([rank, rank + 10])], "b": torch.tensor(float(rank))}
    whole, first = distributed_concat(rows), distributed_concat(rows["a"][0], 3)
    same = nested_gather(rows, "distributed")
    with torch_distributed_zero_first(rank):
        pass
    torch.distributed.destroy_process_group()
    return [whole["a"][0].tolist(), whole["b"].tolist(), first.tolist(), same["b"].tolist()]


def count() -> int:
    torch.distributed.init_process_group("gloo")
    number = total_processes_number(0)
    # gloo connects one to one: who leaves while another still connects fails that one.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return number


def test_rows_of_all_processes_come_in_their_order(run_distributed: Any) -> None:
    assert run_distributed(exchange) == [[[0, 10, 1, 11], [0.0, 1.0], [0, 10, 1], [0.0, 1.0]]] * 2
    assert run_distributed(count) == [2, 2]
    assert total_processes_number(-1) == 1
