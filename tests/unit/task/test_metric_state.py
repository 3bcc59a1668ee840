"""Metrics go on from a state as if nothing had happened, or are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from hftrain.storage.tensors import load_containers, save_containers
from hftrain.task.metric_state import metric_states, restore_metric_states

CPU = torch.device("cpu")


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 3, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(4)]


def collection() -> MetricCollection:
    # Precision and recall share their state within the collection.
    return MetricCollection([MulticlassPrecision(3), MulticlassRecall(3), MulticlassAccuracy(3, average="micro")])


@pytest.mark.parametrize("make", [lambda: MulticlassAccuracy(3), collection])
@pytest.mark.parametrize("num_before", [0, 1, 2, 4])
def test_metric_goes_on_as_if_nothing_had_happened(tmp_path: Path, make: Callable[[], Any], num_before: int) -> None:
    whole, first, second = make(), make(), make()
    for batch in batches():
        whole.update(*batch)
    for batch in batches()[:num_before]:
        first.update(*batch)
    save_containers(metric_states({"m": first}), tmp_path / "state.pt")
    second.update(*batches()[0])
    assert restore_metric_states({"m": second}, load_containers(tmp_path / "state.pt"), device=CPU) == []
    for batch in batches()[num_before:]:
        second.update(*batch)
    expected, value = whole.compute(), second.compute()
    for name in expected if isinstance(expected, dict) else [None]:
        assert torch.equal(expected[name], value[name]) if name else torch.equal(expected, value)


def test_gathered_values_and_their_number_come_back() -> None:
    first, second = CatMetric(), CatMetric()
    first.update(torch.tensor([1.0, 2.0]))
    first.update(torch.tensor([3.0]))
    assert restore_metric_states({"c": second}, metric_states({"c": first}), device=CPU) == []
    assert second.update_count == 2
    assert second.compute().tolist() == [1.0, 2.0, 3.0]


def test_metric_whose_state_is_not_known_is_named() -> None:
    class Own:
        def modules(self) -> list[Any]:
            return []

    metrics = {"wrapped": MinMaxMetric(MeanMetric()), "own": Own(), "mean": MeanMetric()}
    states = metric_states(metrics)
    assert list(states) == ["mean"]
    assert restore_metric_states(metrics, states, device=CPU) == ["wrapped", "own"]
    assert restore_metric_states({"mean": MulticlassAccuracy(3)}, states, device=CPU) == ["mean"]
    assert restore_metric_states({"mean": MeanMetric()}, {}, device=CPU) == ["mean"]
