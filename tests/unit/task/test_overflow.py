from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hftrain import ConfigError, DebugUnderflowOverflow, TaskError


class Scale(nn.Module):
    """Multiplies by a number that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x * self.factor


def make_model() -> tuple[nn.Sequential, Scale]:
    scale = Scale()
    return nn.Sequential(nn.Linear(2, 2), scale, nn.ReLU()), scale


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_watch_stops_at_the_first_fault_and_shows_the_frames_before(
    factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, scale = make_model()
    watch = DebugUnderflowOverflow(model, max_frames_to_save=3)
    model(torch.ones(1, 2))
    scale.factor = factor
    with pytest.raises(TaskError, match=r"1 \(Scale\)\. In batch 1 its output held an infinity or NaN"):
        model(torch.ones(1, 2))
    watch.remove()
    report = caplog.text
    assert report.count("Linear") == 1
    assert report.count("output") == 3
    for part in ("last 3 frames", "parameter['weight']", "0 Linear", "1 Scale", "(the model) Sequential"):
        assert part in report
    assert "2 ReLU" not in report


def test_mask_with_infinities_by_keyword_is_no_fault() -> None:
    scale = Scale()
    watch = DebugUnderflowOverflow(scale)
    scale(torch.ones(1, 2), mask=torch.full((2, 2), float("-inf")))
    watch.remove()


def test_traced_batches_are_logged_whole_and_do_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    model, scale = make_model()
    watch = DebugUnderflowOverflow(model, trace_batch_nums=[1])
    with caplog.at_level(logging.WARNING):
        model(torch.ones(1, 2))
        assert not caplog.records
        scale.factor = float("inf")
        model(torch.ones(1, 2))
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == ["Batch 1"] * 4
    watch.remove()


def test_watch_stops_after_the_batch_that_was_named() -> None:
    model, _ = make_model()
    watch = DebugUnderflowOverflow(model, abort_after_batch_num=1)
    model(torch.ones(1, 2))
    with pytest.raises(TaskError, match="abort_after_batch_num=1"):
        model(torch.ones(1, 2))
    watch.remove()


def test_report_without_frames_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_frames_to_save=0"):
        DebugUnderflowOverflow(nn.Linear(1, 1), max_frames_to_save=0)
