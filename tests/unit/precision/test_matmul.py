"""TF32 flags: set, and put back as they were."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hftrain.precision.registry import precisions

CPU = torch.device("cpu")


def flags() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("before", [("highest", False), ("highest", True), ("medium", False)])
@pytest.mark.parametrize(
    ("name", "options", "during"),
    [
        ("tf32", {}, ("high", True)),
        ("fp32", {"matmul": "highest"}, ("highest", False)),
        ("bf16", {"matmul": "high"}, ("high", True)),
        ("fp16", {"matmul": "highest"}, ("highest", False)),
        ("fp32", {}, None),
        ("bf16", {}, None),
    ],
)
def test_flags_are_set_while_open_and_put_back(
    name: str, options: dict[str, str], during: tuple[str, bool] | None, before: tuple[str, bool]
) -> None:
    found = flags()
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    precision = precisions.create(name, **options)
    precision.open(CPU, lambda device: torch.amp.GradScaler(device.type))
    assert flags() == (during or before)
    precision.close()
    assert flags() == before
    torch.set_float32_matmul_precision("high")
    precision.close()
    assert flags()[0] == "high"
    torch.set_float32_matmul_precision(found[0])
    torch.backends.cudnn.allow_tf32 = found[1]


NEWER_FLAGS = """
import torch
from hftrain.core.errors import ConfigError
from hftrain.precision.registry import precisions
torch.backends.cuda.matmul.fp32_precision = "tf32"
try:
    precisions.create("tf32").open(torch.device("cpu"), None)
except ConfigError as error:
    assert "refuses to mix" in str(error)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    print("refused")
"""


def test_flags_set_through_the_newer_interface_are_left_alone() -> None:
    # In a process of its own: torch has no way to forget that the newer interface was used.
    done = subprocess.run([sys.executable, "-c", NEWER_FLAGS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused"
