"""Whether an item count was read is seen through TorchScript and compiled code, which run as they would without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from hftrain.task.tracked_count import ReadFlag, TrackedCount


def divide(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return x.sum() / count


def move(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return x.sum() / count.to(x.device).float()


def ignore(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return x.sum() / 4


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("make", [lambda function: function, torch.jit.script, compiled], ids=["", "script", "compile"])
@pytest.mark.parametrize("function", [divide, move, ignore])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_only_reads_are_noted(make: Any, function: Any) -> None:
    note, x = ReadFlag(), torch.ones(3)
    assert float(make(function)(x, TrackedCount.make(4, note))) == 0.75
    assert note.found() == (function is not ignore)


def test_count_in_another_form_is_still_noted() -> None:
    note = ReadFlag()
    moved = TrackedCount.make(4, note).to(torch.float32).cpu().view(1)
    assert isinstance(moved, TrackedCount)
    assert not note.is_read
    assert moved.item() == 4
    assert note.is_read


def test_count_whose_memory_is_taken_is_noted() -> None:
    note = ReadFlag()
    count = TrackedCount.make(torch.tensor(4), note)
    assert count.size() == ()
    assert count.clone().dim() == 0
    assert not note.found()
    assert from_dlpack(to_dlpack(count)).item() == 4
    assert note.found()
