"""What the launcher says, and which device there is."""

from __future__ import annotations

import pytest
import torch

from hftrain.strategies.environment import find_device_type, lacks_processes


def test_cpu_is_found_when_asked_for() -> None:
    assert find_device_type(use_cpu=True) == "cpu"


# The accelerators' presence is pretended: only the choice between them is under test.
@pytest.mark.parametrize(("present", "expected"), [({"cuda", "mps"}, "cuda"), ({"mps"}, "mps"), (set(), "cpu")])
def test_accelerator_is_preferred(monkeypatch: pytest.MonkeyPatch, present: set[str], expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in present)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in present)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert find_device_type() == expected


def test_other_accelerators_are_found_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    assert find_device_type() == "xpu"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, True),
        ({"WORLD_SIZE": "1"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, False),
        ({"MASTER_ADDR": None}, False),
    ],
)
def test_processes_that_accelerate_did_not_start_are_missed(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, str | None], expected: bool
) -> None:
    said = {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**said, **extra}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert lacks_processes() is expected
