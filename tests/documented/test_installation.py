"""What the documentation says of installing: what comes along, what is replaced, and what to do when CUDA compiles."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT
from support.tiny import make_arguments

PAGE = "\n".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("strategy", "distributed"))


def test_accelerate_comes_with_hftrain() -> None:
    always = [line for line in requires("hftrain") or [] if "extra ==" not in line]
    assert any(line.startswith("accelerate") for line in always)
    assert any(line.startswith("torch") for line in always)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("given", "successor"),
    [
        ("simple", ["shard_grad_op"]),
        (True, ["shard_grad_op"]),
        ("zero_dp_2", ["shard_grad_op"]),
        ("zero_dp_2 cpu_offload", ["shard_grad_op", "offload"]),
        ("zero_dp_3", ["full_shard"]),
        ("zero_dp_3 cpu_offload auto_wrap", ["full_shard", "offload", "auto_wrap"]),
    ],
)
def test_fairscale_is_replaced_as_the_page_says(tmp_path: Path, given: Any, successor: list[str]) -> None:
    assert [str(word) for word in make_arguments(tmp_path, sharded_ddp=given).fsdp] == successor
    rows = [line for line in PAGE.splitlines() if line.startswith("| `sharded_ddp`")]
    assert any(
        f'`fsdp="{successor[0]}"`' in row and str(given).split()[0].replace("True", "simple") in row for row in rows
    )


def test_page_says_that_fairscale_need_not_be_installed() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("FairScale")]
    for way in ("pip", "extras", "--no-build-isolation", "wheel", "nightly"):
        assert way in line


def test_page_says_what_a_cuda_extension_wants() -> None:
    for words in ("`nvcc --version`", "torch.version.cuda", "export PATH=", "LD_LIBRARY_PATH=", "ln -s /usr/bin/gcc-"):
        assert words in PAGE
    assert "DeepSpeed (`pip install 'hftrain[deepspeed]'`) compiles CUDA extensions" in PAGE
