"""`hftrain check` on the simulated accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hftrain.core import seed
from hftrain.extras.check import proofs

pytestmark = pytest.mark.sim

ALONE = ["device", "numbers in float32", "numbers in bfloat16", "resume", "background save", "folder", "waits"]


@pytest.mark.parametrize("name", ALONE)
def test_line_holds_on_the_device(name: str) -> None:
    outcome = next(proofs.prove_all(None, only=name))
    assert outcome.status == "PASS", outcome
    if name == "device":
        assert "2 x simulated accelerator (sim)" in outcome.found


def test_device_without_memory_fails(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    outcome = next(proofs.prove_all(None, only="device"))
    assert (outcome.status, "Another process holds the memory" in outcome.remedy) == ("FAIL", True)


def test_generator_of_the_device_that_is_not_restored_fails(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "rng_devices", list)
    assert next(proofs.prove_all(None, only="resume")).status == "FAIL"


def prove() -> dict[str, str]:
    from support.torch_sim import load

    load()
    return {each.name: each.status for each in proofs.prove_all(None)}


def test_all_lines_hold_on_two_devices(run_distributed: Any) -> None:
    assert torch.accelerator.device_count() == 2
    expected = dict.fromkeys(proofs.PROOFS, "PASS") | {"waits": "not here", "cost of a step": "not here"}
    assert run_distributed(prove) == [expected, expected]
