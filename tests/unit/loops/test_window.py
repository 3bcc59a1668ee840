"""What a logging window has summed up."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import through_file

from hftrain.extras.live_window import LiveLossWindow
from hftrain.loops.window import LogWindow, LossWindow, as_numbers

NAN, INF = math.nan, math.inf


def make_window(*, filters: bool = True, reduce: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> LossWindow:
    return LossWindow(hides_nonfinite=filters, reduce=reduce)


def add_steps(window: LossWindow, steps: list[list[float]]) -> None:
    for micro_steps in steps:
        for loss in micro_steps:
            window.add(torch.tensor(loss))
        window.num_steps += 1


@pytest.mark.parametrize(
    ("losses", "filtered"),
    [
        ([1.0, NAN, 3.0], [1.0, 2.0, 3.0]),
        ([1.0, 3.0, INF], [1.0, 2.0, 3.0]),
        ([NAN, 2.0], [2.0, 2.0]),
        ([NAN, -INF], [NAN, NAN]),
        ([4.0, NAN, NAN, 2.0, INF], [3.0, 3.0, 3.0, 3.0, 3.0]),
    ],
)
def test_filter_puts_the_windows_mean_in_place_of_what_is_not_finite(
    losses: list[float], filtered: list[float]
) -> None:
    window = make_window()
    add_steps(window, [[loss] for loss in losses])
    with pytest.warns(UserWarning, match="nonfinite_losses"):
        logs = window.read()
    num_nonfinite = sum(not math.isfinite(loss) for loss in losses)
    assert logs == {
        "loss": pytest.approx(sum(filtered) / len(filtered), nan_ok=True),
        "nonfinite_losses": num_nonfinite,
    }


def test_filter_takes_the_mean_over_micro_steps() -> None:
    window = make_window()
    add_steps(window, [[0.5, 1.5], [NAN, 2.0]])
    with pytest.warns(UserWarning, match="at least once"):
        assert window.read()["loss"] == pytest.approx((0.5 + 1.5 + 2.0) / 3 * 4 / 2)


def test_without_the_filter_nan_is_shown() -> None:
    window = make_window(filters=False)
    add_steps(window, [[1.0], [NAN]])
    logs = window.read()
    assert list(logs) == ["loss"]
    assert math.isnan(logs["loss"])


def test_long_window_is_the_same_to_the_last_bit_after_a_resume() -> None:
    losses = [loss.item() for loss in torch.randn(150).exp()]
    whole = make_window()
    add_steps(whole, [[loss] for loss in losses])
    expected = whole.read()
    assert expected == {"loss": pytest.approx(sum(losses) / len(losses))}
    for num_before in (1, 63, 64, 65, 128, 149):
        first, second = make_window(), make_window()
        add_steps(first, [[loss] for loss in losses[:num_before]])
        second.load_state_dict(through_file(first.state_dict()), device=torch.device("cpu"))
        add_steps(second, [[loss] for loss in losses[num_before:]])
        assert second.read() == expected


@pytest.mark.filterwarnings("ignore:The loss was NaN")
def test_filter_counts_over_a_long_window() -> None:
    window = make_window()
    add_steps(window, [[NAN if step % 10 == 3 else float(step)] for step in range(200)])
    finite = [step for step in range(200) if step % 10 != 3]
    assert window.read() == {"loss": pytest.approx(sum(finite) / len(finite)), "nonfinite_losses": 20}


@pytest.mark.filterwarnings("ignore:The loss was NaN")
def test_window_without_a_finite_loss_is_left_out_of_the_run() -> None:
    window = make_window()
    add_steps(window, [[NAN]])
    assert math.isnan(window.read()["loss"])
    assert math.isnan(window.mean_over_run())
    add_steps(window, [[2.0]])
    window.read()
    assert window.mean_over_run() == 2.0


# -- what steps log --------------------------------------------------------------------------------------------------


def test_logs_of_ranks_are_weighed_by_their_steps(run_ranks: Callable[..., list[Any]]) -> None:
    per_rank: list[list[dict[str, float]]] = [[{"a": 1.0}, {"a": 2.0, "b": 5.0}], [{"a": 6.0}], []]

    def read(group: Any) -> dict[str, float]:
        window = LogWindow(gather_object=group.gather_object)
        for logs in per_rank[group.rank]:
            window.add({name: torch.tensor(value) for name, value in logs.items()})
        return window.read()

    assert run_ranks(read, 3) == [{"a": 3.0, "b": 5.0}] * 3


# -- merging ---------------------------------------------------------------------------------------------------------


def test_number_of_a_sharded_tensor_is_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `clip_grad_norm_` returns over sharded parameters: a norm of which each rank holds a part."""
    # torch replaces the hook and keeps its own.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        from torch.distributed.tensor import distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh))
        (parameter * 2).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        assert type(norm).__name__ == "DTensor"
        assert as_numbers(norm)[0] == 4.0
    finally:
        torch.distributed.destroy_process_group()


def test_norm_that_an_engine_tells_when_asked_is_saved_as_a_number() -> None:
    class Lazy:
        def __float__(self) -> float:
            return 0.5

    window = make_window()
    window.grad_norm = Lazy()  # type: ignore[assignment]
    assert window.state_dict()["grad_norm"] == 0.5


def test_steps_that_are_left_in_a_live_window_are_counted_when_they_are_read() -> None:
    window = LiveLossWindow(hides_nonfinite=False, reduce=torch.clone)
    add_steps(window, [[2.0]] * 3)
    total = window.open_sum()
    total -= 4.0
    window.run_total += 4.0
    window.leave(1)
    assert window.mean_over_run() == 2.0
    assert window.read() == {"loss": 2.0}
    assert window.mean_over_run() == 2.0
