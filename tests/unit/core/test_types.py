"""Values that cross rooms."""

from __future__ import annotations

from hftrain.core.types import EvalPrediction, StepOutput


def test_prediction_unpacks_into_the_parts_that_are_there() -> None:
    predictions, labels = EvalPrediction("p", "l")
    assert (predictions, labels) == ("p", "l")
    assert tuple(EvalPrediction("p", "l", losses="x")) == ("p", "l", "x")
    full = EvalPrediction("p", None, inputs="i", losses="x")
    assert tuple(full) == ("p", None, "i", "x")
    assert [full[0], full[-1]] == ["p", "x"]


def test_step_outputs_share_no_logs() -> None:
    assert StepOutput().logs == {}
    assert StepOutput().logs is not StepOutput().logs
