"""What the launcher says, and which device there is."""

from __future__ import annotations

import pytest
import torch

from hftrain.core.devices import find_device_type
from hftrain.core.launcher import lacks_processes


def test_cpu_is_found_when_asked_for() -> None:
    assert find_device_type(use_cpu=True) == "cpu"


# Its presence is pretended.
@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", None])
def test_accelerator_is_found_through_torch(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert find_device_type() == (kind or "cpu")


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
