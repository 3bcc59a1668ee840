"""One pass without gradients: the loss's mean over items, metrics, and what is kept."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hftrain.core.errors import TaskError
from hftrain.core.types import EvalLoopOutput, EvalPrediction, StepOutput
from hftrain.loops.evaluate import EvaluateConfig, EvaluateHooks, EvaluateLoop, EvaluateParts
from hftrain.strategies.single import SingleDeviceStrategy


class Diary:
    """Note what is fired."""

    heard = frozenset({"on_prediction_step"})

    def __init__(self) -> None:
        self.entries: list[str] = []

    def fire(self, event: str, **extra: Any) -> None:
        self.entries.append(event)


def alone() -> SingleDeviceStrategy:
    strategy = SingleDeviceStrategy(use_cpu=True)
    strategy.launch()
    return strategy


def mean_of_labels(batch: Mapping[str, torch.Tensor]) -> StepOutput:
    """Say that the loss is the mean of the labels that count: NaN where none does, as torch has it."""
    labels = batch["labels"]
    kept = labels[labels != -100].double()
    return StepOutput(loss=kept.mean(), outputs=batch["x"] * 2, labels=labels, logs={"size": len(labels)})


def count(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def make_batches(*labels: list[int]) -> list[dict[str, torch.Tensor]]:
    starts = [sum(map(len, labels[:index])) for index in range(len(labels))]
    return [
        {"x": torch.arange(start, start + len(group)).float(), "labels": numbers, "input_ids": -numbers}
        for start, group in zip(starts, labels, strict=True)
        for numbers in [torch.tensor(group)]
    ]


def make_loop(
    kind: type[EvaluateLoop] = EvaluateLoop,
    *,
    group: Any = None,
    events: Any = None,
    hooks: dict[str, Any] | None = None,
    **config: Any,
) -> EvaluateLoop:
    parts = EvaluateParts(
        config=EvaluateConfig(**config),
        hooks=EvaluateHooks(**{"evaluate_batch": mean_of_labels, "count_items": count, **(hooks or {})}),
        group=group or alone(),
        events=events or Diary(),
    )
    loop = kind()
    loop.attach(parts)
    return loop


def test_loss_is_the_mean_over_items_however_the_set_is_cut() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        labels = [rng.choice([-100, 0, 1, 2]) for _ in range(rng.randint(1, 20))]
        kept = [label for label in labels if label != -100]
        size = rng.randint(1, 6)
        batches = make_batches(*(labels[start : start + size] for start in range(0, len(labels), size)))
        output = make_loop().run(batches)
        assert output.num_samples == len(labels)
        if kept:
            assert output.metrics["loss"] == pytest.approx(sum(kept) / len(kept))
        else:
            assert "loss" not in output.metrics


def test_nan_of_a_batch_that_counts_is_shown() -> None:
    loop = make_loop(hooks={"evaluate_batch": lambda batch: StepOutput(loss=torch.tensor(math.nan))})
    assert math.isnan(loop.run(make_batches([1], [2])).metrics["loss"])


def test_empty_loader_gives_nothing_and_says_so() -> None:
    with pytest.warns(UserWarning, match="read no sample"):
        assert make_loop(keeps_predictions=True).run([]) == EvalLoopOutput(None, None, {}, 0)


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("missing", ["outputs", "labels"])
def test_compute_metrics_needs_predictions_and_labels(missing: str, per_batch: bool) -> None:
    def step(batch: Any) -> StepOutput:
        output = mean_of_labels(batch)
        setattr(output, missing, None)
        return output

    hooks = {"evaluate_batch": step, "compute_metrics": lambda *args, **kwargs: 1 / 0}
    loop = make_loop(keeps_predictions=not per_batch, computes_per_batch=per_batch, hooks=hooks)
    assert "loss" in loop.run(make_batches([1])).metrics


@pytest.mark.parametrize("per_batch", [False, True])
def test_preprocessing_that_returns_nothing_is_named(per_batch: bool) -> None:
    hooks = {"preprocess_logits": lambda logits, labels: None, "compute_metrics": lambda p, **kwargs: {"n": 1.0}}
    loop = make_loop(keeps_predictions=True, computes_per_batch=per_batch, hooks=hooks)
    with pytest.raises(TaskError, match="it is None, so there is nothing"):
        loop.run(make_batches([1]))


@pytest.mark.parametrize("per_batch", [False, True])
def test_metrics_that_are_forgotten_to_be_returned_are_named(per_batch: bool) -> None:
    hooks = {"compute_metrics": lambda prediction, **kwargs: None}
    loop = make_loop(keeps_predictions=True, computes_per_batch=per_batch, hooks=hooks)
    with pytest.warns(UserWarning, match="compute_metrics returned None"):
        assert list(loop.run(make_batches([1], [2])).metrics) == ["loss", "size"]


@pytest.mark.parametrize("includes", [(), ("inputs", "loss")])
def test_metrics_batch_by_batch_keep_nothing(includes: tuple[str, ...]) -> None:
    calls: list[tuple[list[int], bool, Any, Any]] = []

    def compute(prediction: EvalPrediction, compute_result: bool) -> dict[str, float] | None:
        assert isinstance(prediction.predictions, torch.Tensor)
        calls.append((prediction.label_ids.tolist(), compute_result, prediction.inputs, prediction.losses))
        return {"calls": float(len(calls))} if compute_result else None

    loop = make_loop(computes_per_batch=True, includes=includes, hooks={"compute_metrics": compute})
    output = loop.run(make_batches([1, 2], [3], [4]))
    assert [call[:2] for call in calls] == [([1, 2], False), ([3], False), ([4], True)]
    assert output.metrics["calls"] == 3.0
    assert output.predictions is None
    if includes:
        assert calls[0][2].tolist() == [-1, -2]
        assert calls[0][3].tolist() == [1.5, 1.5]


@pytest.mark.parametrize(("missing", "named"), [("outputs", "predictions"), ("labels", "labels")])
def test_metrics_that_must_come_need_predictions_and_labels(missing: str, named: str) -> None:
    def step(batch: Any) -> StepOutput:
        output = mean_of_labels(batch)
        setattr(output, missing, None)
        return output

    loop = make_loop(
        keeps_predictions=True,
        hooks={"evaluate_batch": step, "compute_metrics": lambda prediction: {}, "needs_labels": True},
    )
    with pytest.raises(TaskError, match=rf"gave no {named} .*the columns x, labels, input_ids"):
        loop.run(make_batches([1]))


def test_number_under_a_name_that_is_taken_is_left_out_with_a_warning() -> None:
    loop = make_loop(keeps_predictions=True, hooks={"compute_metrics": lambda prediction: {"loss": 99.0, "f1": 1.0}})
    with pytest.warns(UserWarning, match="their names are taken: loss"):
        metrics = loop.run(make_batches([1, 3])).metrics
    assert (metrics["loss"], metrics["f1"]) == (2.0, 1.0)
