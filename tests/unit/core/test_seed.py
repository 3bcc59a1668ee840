"""Random number generators: set, captured and put back."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.resuming import through_file

from hftrain.core.seed import capture_rng, enable_full_determinism, preserved_rng, restore_rng, set_seed


def draw() -> tuple[Any, ...]:
    """Draw from every generator; an odd number of normal variates leaves one cached."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.standard_normal()),
        numpy.random.randint(1 << 30),
        torch.randn(3).tolist(),
    )


@pytest.mark.parametrize("num_before", [0, 1, 2, 700])
def test_state_comes_back_from_a_file_that_runs_no_code(num_before: int) -> None:
    set_seed(3)
    for _ in range(num_before):
        draw()
    state = through_file(capture_rng())
    expected = [draw() for _ in range(3)]
    set_seed(99)
    draw()
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("fails", [False, True])
def test_generators_are_left_as_found(fails: bool) -> None:
    set_seed(1)
    expected = draw()
    set_seed(1)
    try:
        with preserved_rng():
            draw()
            set_seed(5)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert draw() == expected


@pytest.fixture
def determinism_put_back(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put back what full determinism changes in the whole process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def test_deterministic_seed_asks_torch_for_deterministic_algorithms(determinism_put_back: None) -> None:
    set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("warn_only", [False, True])
def test_full_determinism_sets_flags_and_variables(determinism_put_back: None, warn_only: bool) -> None:
    enable_full_determinism(4, warn_only=warn_only)
    first = draw()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    set_seed(4)
    assert draw() == first


class Accelerators:
    """A stand-in for the module of an accelerator that cannot be here: two devices, each with its own generator."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(index) for index in range(2)]

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.generators[index].get_state()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.generators[index].set_state(state)

    def draw(self) -> list[list[float]]:
        return [torch.rand(2, generator=generator).tolist() for generator in self.generators]


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, module: Any, devices: list[Any]) -> None:
    """Let torch say that its accelerator is of this kind."""
    monkeypatch.setattr(torch, kind, module, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


@pytest.mark.parametrize("is_below", [False, True])
@pytest.mark.parametrize("name", ["xpu", "hpu", "privateuseone"])
def test_state_of_every_device_of_every_accelerator_comes_back(
    monkeypatch: pytest.MonkeyPatch, name: str, is_below: bool
) -> None:
    devices = Accelerators()
    # Some have the functions in a module below.
    pretend(monkeypatch, name, SimpleNamespace(random=devices) if is_below else devices, devices.generators)
    state = through_file(capture_rng())
    expected = devices.draw()
    assert devices.draw() != expected
    restore_rng(state)
    assert devices.draw() == expected
    # A machine with fewer devices takes those it has.
    del devices.generators[1]
    restore_rng(state)
    assert devices.draw() == expected[:1]


def test_accelerator_without_generator_functions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "hpu", SimpleNamespace(), [0])
    with pytest.warns(UserWarning, match=r"torch\.hpu has no get_rng_state"):
        assert "hpu" not in capture_rng()
