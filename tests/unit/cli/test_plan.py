"""`hftrain plan`: a script's model is planned for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hftrain import ConfigError
from hftrain.cli.commands import main
from hftrain.cli.plan import read_bytes, show_plan
from hftrain.strategies.mesh.proposal import USABLE

SCRIPT = """
import sys
import torch
import transformers
from hftrain import Trainer, TrainingArguments

sizes = dict(hidden_size=4096, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8)
config = transformers.LlamaConfig(vocab_size=32000, intermediate_size=11008, **sizes)
model = transformers.LlamaForCausalLM(config)
ids = torch.zeros(int(sys.argv[1]), dtype=torch.long)
args = TrainingArguments("out", bf16=True, use_cpu=True, report_to="none", per_device_train_batch_size=2)
Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8).train()
print("trained")
"""


@pytest.fixture
def script(tmp_cwd: Path) -> Path:
    pytest.importorskip("transformers")
    path = tmp_cwd / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_proposal_is_printed_with_its_reasons(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--gpus", "8", "--memory", "16GB", "--json", str(script), "512"])
    found = json.loads(capsys.readouterr().out)
    assert any(name.startswith("ddp ") and "GB usable" in reason for name, reason in found["rejected"].items())
    best = found["proposal"]
    held = best["parameters"] + best["gradients"] + best["optimizer"]
    assert held + best["activations"] + best["temporary"] <= 16e9 * USABLE
    assert best == found["fits"][0]
    assert not Path("out").exists()


@pytest.mark.parametrize(("gpus", "machine"), [(8, 8), (64, 8), (512, 8)])
def test_meshes_fit_the_processes_and_hold_one_copy(script: Path, gpus: int, machine: int) -> None:
    found = show_plan(script, ["64"], gpus=gpus, gpus_per_machine=machine, memory="400GB").data
    names = {each["strategy"]: each for each in found["fits"]}
    assert {"ddp", "fsdp", "fsdp_tp", "fsdp_cp"} <= set(names)
    assert ("hsdp" in names) == (gpus > machine)
    # Two copies of 4 bytes for AdamW.
    assert names["ddp"]["optimizer"] == pytest.approx(2 * names["ddp"]["parameters"], rel=1e-3)
    assert names["fsdp"]["parameters"] == pytest.approx(names["ddp"]["parameters"] / gpus, rel=0.02)
    assert all(each["options"].get("tp_size", 1) <= machine for each in found["fits"])
    assert (names["ddp"]["between"] > 0) == (gpus > machine)


def test_heads_that_ranks_do_not_divide_are_a_reason(script: Path) -> None:
    found = show_plan(script, ["64"], gpus=16, gpus_per_machine=16).data
    assert "tensor ranks" in found["rejected"]["tp (tp 16)"]


def test_nothing_that_fits_is_one_line_with_what_would(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--gpus", "1", "--memory", "1GB", str(script), "64"])
    assert ended.value.code == 1
    assert "more GPUs" in capsys.readouterr().err


def test_size_that_cannot_be_read_is_refused() -> None:
    assert (read_bytes("80GB"), read_bytes("1.5 T"), read_bytes("10")) == (80e9, 1.5e12, 10)
    with pytest.raises(ConfigError, match="not a size"):
        read_bytes("much")


def test_number_of_gpus_is_positive(script: Path) -> None:
    with pytest.raises(ConfigError, match="There is not one"):
        show_plan(script, ["64"], gpus=0)
