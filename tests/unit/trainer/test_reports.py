"""Numbers about a run, and how they are shown and stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hftrain.core.errors import TaskError
from hftrain.core.metrics import to_plain
from hftrain.extras.reports import metrics_format, metrics_table, store_metrics


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(1.5), 1.5),
        (torch.tensor([2]), 2),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.array([[1, 2]]), [[1, 2]]),
        (numpy.array(4.0), 4.0),
        ({"a": torch.tensor(1), 2: (numpy.int32(3), [None])}, {"a": 1, "2": [3, [None]]}),
        ("text", "text"),
        (None, None),
    ],
)
def test_plain_values_are_ready_for_json(value: Any, plain: Any) -> None:
    result = to_plain({"name": value})
    assert result == {"name": plain}
    assert type(result["name"]) is type(plain)
    assert json.loads(json.dumps(result)) == {"name": plain}


@pytest.mark.parametrize("value", [object(), {1, 2}, [b"bytes"]])
def test_value_that_no_file_can_hold_is_named(value: Any) -> None:
    with pytest.raises(TaskError, match=r"Cannot report 'name': it is a (object|set|bytes), which no log"):
        to_plain({"name": value})


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("eval_mem_cpu_alloc_delta", 3 << 20, "3MB"),
        ("init_mem_gpu_peaked_delta", (5 << 20) + 1000, "5MB"),
        ("total_flos", 7 << 30, "7GF"),
        ("total_flos", float(7 << 30), "7GF"),
        ("train_runtime", 0.0, "0:00:00.00"),
        ("train_runtime", 3.14159, "0:00:03.14"),
        ("train_runtime", 75.5, "0:01:15.50"),
        ("train_runtime", 59.999, "0:01:00.00"),
        ("train_runtime", 3600, "1:00:00.00"),
        ("train_runtime", 36000.25, "10:00:00.25"),
        ("train_runtime", 86400 + 7200 + 0.5, "1 day, 2:00:00.50"),
        ("eval_loss", 0.123456, 0.1235),
        ("eval_steps_per_second", 10.0, 10.0),
        ("train_samples", 1000, 1000),
        ("note", "text", "text"),
    ],
)
def test_metrics_are_shown_readably(name: str, value: Any, shown: Any) -> None:
    assert metrics_format({name: value}) == {name: shown}


def test_table_is_aligned_and_sorted() -> None:
    table = metrics_table("eval", {"eval_loss": 0.123456, "epoch": 1.0, "eval_runtime": 75.5})
    assert table.splitlines() == [
        "***** eval metrics *****",
        "  epoch        =        1.0",
        "  eval_loss    =     0.1235",
        "  eval_runtime = 0:01:15.50",
    ]


def test_metrics_are_stored_for_each_split_and_together(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    store_metrics(folder, "train", {"train_loss": torch.tensor(2.0), "epoch": 1}, combined=True)
    store_metrics(folder, "eval", {"eval_loss": numpy.float64(3.0), "epoch": 2}, combined=True)
    store_metrics(folder, "test", {"test_loss": 4.0}, combined=False)
    stored = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert stored == {
        "train_results.json": {"train_loss": 2.0, "epoch": 1},
        "eval_results.json": {"eval_loss": 3.0, "epoch": 2},
        "test_results.json": {"test_loss": 4.0},
        "all_results.json": {"train_loss": 2.0, "eval_loss": 3.0, "epoch": 2},
    }
