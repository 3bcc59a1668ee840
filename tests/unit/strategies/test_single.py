"""One process: which device, and what is refused before it is touched."""

from __future__ import annotations

import pytest
import torch

from hftrain.core.errors import ConfigError
from hftrain.precision.registry import precisions
from hftrain.strategies.registry import create_strategy
from hftrain.strategies.single import MPSStrategy, SingleDeviceStrategy


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_cpu": True, "device": "cuda:0"}, "use_cpu=True forbids it"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, "devices of type 'cuda'"),
    ],
)
def test_device_that_cannot_be_used_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        SingleDeviceStrategy(**options)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_name_of_the_apple_gpu_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match="0 devices of type 'mps'"):
        MPSStrategy()
    with pytest.raises(ConfigError, match="use_cpu=True forbids it"):
        MPSStrategy(use_cpu=True)


def test_name_of_the_apple_gpu_takes_it_and_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # No Apple GPU here: torch is made to say that there is one, and nothing is put on it.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    strategy = create_strategy("mps")
    assert (strategy.name, strategy.device_type) == ("mps", "mps")
    policy = precisions.create("fp32").policy
    assert strategy.refuses(policy, "mps") is None
    assert strategy.refuses(policy, "cpu") == "it runs on Apple GPUs only"


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="train separate copies"):
        SingleDeviceStrategy(use_cpu=True)


@pytest.mark.cuda
def test_cuda_device_gets_an_index_and_becomes_the_current_one() -> None:
    strategy = SingleDeviceStrategy()
    strategy.launch()
    assert strategy.device == torch.device("cuda", torch.cuda.current_device())
