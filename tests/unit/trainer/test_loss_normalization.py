"""A micro-batch's mean loss becomes its share of the step's mean, in the loss's precision and without a wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kinds import Ordered, PerSample, full_rows, make_model, make_rows
from support.tiny import Net, make_arguments
from support.tiny import make_rows as make_single

from hftrain.trainer.loss_kinds import LossWatch
from hftrain.trainer.loss_normalization import _weighted


class OnDevice(torch.Tensor):
    """A tensor that may not be read, as if it were on a device."""

    def item(self) -> Any:
        raise AssertionError("The host waits for the device.")


def late() -> Any:
    """Return samples that tell labels from samples in the third step alone."""
    return [*full_rows(), *make_rows()]


def count_on(number: int, device: str) -> Any:
    count = torch.tensor(number)
    return {"host": number, "cpu": count, "device": count.as_subclass(OnDevice)}[device]


@pytest.mark.parametrize("place", ["host", "cpu", "device"])
@pytest.mark.parametrize("total_place", ["host", "cpu", "device"])
@pytest.mark.parametrize(
    ("dtype", "share", "total", "tolerance"),
    [(torch.float64, 1, 3, 1e-15), (torch.float32, 2, 3, 1e-6), (torch.float16, 40_000, 80_000, 1e-3)],
)
def test_loss_is_weighed_in_its_own_precision(
    place: str, total_place: str, dtype: torch.dtype, share: int, total: int, tolerance: float
) -> None:
    loss = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    # A share that the host cannot tell comes as a tensor on the device.
    own = share if place == "cpu" else count_on(share, place)
    weighed = _weighted(loss, own * 2, count_on(total, total_place)).as_subclass(torch.Tensor)
    assert weighed.dtype == dtype
    assert weighed.item() == pytest.approx(3 * 2 * share / total, rel=tolerance)
    weighed.backward()
    assert float(loss.grad) == pytest.approx(2 * share / total, rel=tolerance)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("total", [0, 5])
def test_mean_over_no_item_counts_nothing(place: str, total: int) -> None:
    value = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = value * 3 + float("nan")
    weighed = _weighted(loss, count_on(0, place), count_on(total, place)).as_subclass(torch.Tensor)
    # The mean over the items of a step that has none is shown as what it is.
    assert weighed.item() == pytest.approx(0.0 if total else float("nan"), nan_ok=True)
    weighed.backward()
    assert value.grad == 0


@pytest.mark.parametrize(
    ("kind", "rows", "num"), [(PerSample, make_rows, 1), (Net, lambda: make_single(8), 1), (PerSample, late, 2)]
)
def test_one_batch_that_can_tell_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, rows: Any, num: int
) -> None:
    looks: list[Any] = []
    recognise = LossWatch.recognise
    monkeypatch.setattr(LossWatch, "recognise", lambda *args: looks.append(0) or recognise(*args))
    arguments = make_arguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=8
    )
    Ordered(make_model(kind), arguments, train_dataset=rows()).train()
    assert len(looks) == num
