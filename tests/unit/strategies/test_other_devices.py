"""Ascend and AMD devices. There are none here: torch is made to say so, and nothing is put on them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hftrain.precision.registry import precisions
from hftrain.step.legality import check_legal
from hftrain.strategies.registry import create_strategy

# In a process of its own, because torch keeps the name of a device. `torch_npu` does what stands in the middle.
ASCEND = """
import torch, torch.distributed as dist
torch.utils.rename_privateuse1_backend("npu")
dist.Backend.register_backend("hccl", lambda *given: None, devices=["npu"])
torch.accelerator.current_accelerator = lambda check_available: torch.device("npu")

from hftrain.precision.registry import precisions
from hftrain.step.legality import check_legal
from hftrain.strategies.registry import create_strategy

strategy = create_strategy("ddp")
assert (strategy.device_type, strategy.backend) == ("npu", "hccl"), strategy.backend
assert create_strategy("ddp", backend="hccl").backend == "hccl"
check_legal(strategy, precisions.create("bf16"))
"""


def test_ascend_device_is_found_and_talks_through_hccl_in_bfloat16() -> None:
    ended = subprocess.run([sys.executable, "-c", ASCEND], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "tf32"])
def test_amd_gpu_is_a_cuda_device(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))  # gfx942
    strategy = create_strategy("single")
    assert strategy.device_type == "cuda"
    check_legal(strategy, precisions.create(precision))
