"""The budgets of a step: frames to backward, Python calls. Its waits for a device are in `tests/sim/test_waits.py`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Rows, Task, make_arguments, make_rows
from torch import nn

from hftrain import PrinterCallback, Trainer

MAX_FRAMES_FOR_A_TASK = 4
MAX_FRAMES_FOR_A_SUBCLASS = 6
MAX_EXTRA_CALLS = 45


class SubclassTrainer(Trainer):
    """Overrides as the documentation shows them."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def frames_to_backward(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the functions between `FitLoop.run` and `Tensor.backward` of one training run, outermost first."""
    stacks: list[list[str]] = []
    backward = torch.Tensor.backward

    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        names, frame = [], sys._getframe(1)
        while (
            frame.f_code.co_qualname != "FitLoop.run"
            if hasattr(frame.f_code, "co_qualname")
            else frame.f_code.co_name != "run"
        ):
            names.append(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        stacks.append(names[::-1])
        backward(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", spy)
    trainer.train()
    assert stacks
    return max(stacks, key=len)


@pytest.mark.parametrize("model", [Task, Net])
def test_backward_is_few_frames_below_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    trainer = Trainer(model(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows())
    assert len(frames_to_backward(trainer, monkeypatch)) <= MAX_FRAMES_FOR_A_TASK


def test_backward_is_few_frames_below_the_loop_in_a_subclass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SubclassTrainer(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows())
    assert len(frames_to_backward(trainer, monkeypatch)) <= MAX_FRAMES_FOR_A_SUBCLASS


def count_calls_between_backwards(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the Python calls from one step's backward to the next one's, at their fewest."""
    counts: list[int] = []
    calls = 0
    backward = torch.Tensor.backward

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        counts.append(calls)
        backward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", spy)
        sys.setprofile(count)
        try:
            run()
        finally:
            sys.setprofile(None)
    return min(later - earlier for earlier, later in itertools.pairwise(counts[2:]))


class Deep(Net):
    """A network of 1,000 small tensors more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers, *(nn.Linear(3, 3) for _ in range(500)))


def plain_loop(rows: Rows, num_steps: int, make_model: Callable[[], nn.Module] = Net) -> None:
    """Do what the Trainer does in `test_step_costs_few_python_calls_more_than_a_plain_loop`."""
    model = make_model()
    # Listed once: a walk through the modules at each step would flatter the Trainer.
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, collate_fn=torch.utils.data.default_collate)
    step = 0
    while step < num_steps:
        for batch in loader:
            loss = model(**batch)[0]
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step == num_steps:
                break


@pytest.mark.parametrize("model", [Task, Net])
def test_step_costs_few_python_calls_more_than_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    rows = make_rows(40)
    plain = count_calls_between_backwards(lambda: plain_loop(rows, 8), monkeypatch)
    arguments = make_arguments(tmp_path, max_steps=8, logging_strategy="no")
    trainer = Trainer(model(), arguments, train_dataset=rows, data_collator=torch.utils.data.default_collate)
    trainer.remove_callback(PrinterCallback)
    ours = count_calls_between_backwards(trainer.train, monkeypatch)
    assert ours - plain <= MAX_EXTRA_CALLS, f"{ours} calls per step, a plain loop makes {plain}"


def test_python_calls_do_not_grow_with_the_number_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(24)
    extra = []
    for number, model in enumerate((Net, Deep)):
        plain = count_calls_between_backwards(lambda make=model: plain_loop(rows, 6, make), monkeypatch)  # type: ignore[misc]
        arguments = make_arguments(tmp_path / str(number), max_steps=6, logging_strategy="no")
        trainer = Trainer(model(), arguments, train_dataset=rows, data_collator=torch.utils.data.default_collate)
        trainer.remove_callback(PrinterCallback)
        extra.append(count_calls_between_backwards(trainer.train, monkeypatch) - plain)
    assert extra[1] <= extra[0], f"{extra[0]} calls more than a plain loop with 6 tensors, {extra[1]} with 1,006"
