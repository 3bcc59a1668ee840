"""`hftrain plan`: a script's model is planned for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

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


def test_proposal_is_printed_with_its_reasons(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["plan", "--gpus", "8", "--memory", "16GB", "--json", str(script), "512"])
    found = json.loads(capsys.readouterr().out)
    assert any(name.startswith("ddp ") and "GB usable" in reason for name, reason in found["rejected"].items())
    best = found["proposal"]
    held = best["parameters"] + best["gradients"] + best["optimizer"]
    assert held + best["activations"] + best["temporary"] <= 16e9 * USABLE
    assert best == found["fits"][0]
    assert not Path("out").exists()
    main(["plan", "--gpus", "8", "--memory", "16GB", str(script), "512"])
    lines = capsys.readouterr().out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("from hftrain"))
    names: dict[str, Any] = {"model": nn.Linear(2, 2), "train_dataset": [1]}
    for name, value in {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    exec("\n".join(lines[start : start + 3]), names)
    assert names["trainer"].args.per_device_train_batch_size == best["micro_batch"]


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


def test_nothing_that_fits_is_one_line_with_what_would(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--gpus", "1", "--memory", "1GB", str(script), "64"])
    assert ended.value.code == 1
    assert "more GPUs" in capsys.readouterr().err


def test_size_that_cannot_be_read_is_refused() -> None:
    assert (read_bytes("80GB"), read_bytes("1.5 T"), read_bytes("10")) == (80e9, 1.5e12, 10)
    with pytest.raises(ConfigError, match="not a size"):
        read_bytes("much")


def test_gpus_that_cannot_share_the_model_are_named(script: Path) -> None:
    found = show_plan(script, ["64"], gpus=16, gpus_per_machine=16).data
    assert "tensor ranks" in found["rejected"]["tp (tp 16)"]  # do not divide the heads
    with pytest.raises(ConfigError, match="There is not one"):
        show_plan(script, ["64"], gpus=0)


def test_pipelines_are_planned_with_the_time_they_wait(script: Path) -> None:
    found = show_plan(script, ["64"], gpus=4, memory="400GB").data
    names = {(each["strategy"], each["sizes"]["pp"]): each for each in found["fits"] if each["sizes"]["pp"] > 1}
    assert {key[1] for key in names} == {2, 4}
    pipeline, whole = names["pp", 4], next(each for each in found["fits"] if each["strategy"] == "ddp")
    # Two samples a process without a pipeline are eight for four stages, which get them one by one.
    assert (pipeline["micro_batch"], pipeline["options"]["num_micro_batches"]) == (8, 8)
    assert pipeline["idle"] == 3 / 8
    # A stage sends no more than what eight samples of 64 tokens and 4,096 numbers in bf16 take, there and back.
    assert pipeline["inside"] <= 2 * 8 * 64 * 4096 * 2
    layers = whole["parameters"] - 2 * 4 * 32000 * 4096 - 4 * 4096
    assert layers / 4 < pipeline["parameters"] < layers / 4 + 4 * 32000 * 4096 + 4 * (4097 + 2 * 64)  # two buffers
    assert [each for each in found["fits"] if each["idle"]][-1] is found["fits"][-1]


def test_micro_batch_and_checkpointing_stay_as_set(script: Path) -> None:
    text = script.read_text(encoding="utf-8").replace("bf16=True", "bf16=True, gradient_checkpointing=True")
    script.write_text(text.replace("from hftrain", "from transformers"), encoding="utf-8")
    found = show_plan(script, ["64"], gpus=4, memory="400GB", as_set=True).data
    kept = {(each["micro_batch"], each["checkpointing"], each["offload"]) for each in found["fits"]}
    assert kept == {(2, True, False)}


@pytest.mark.parametrize(
    ("after", "sizes"),
    [
        ("] * 8", "strategy=MeshStrategy(tp_size=2, dp_replicate=4)"),
        ('report_to="none"', "parallelism_config=ParallelismConfig(dp_shard_size=8)"),
    ],
)
def test_sizes_that_the_script_names_do_not_stop_its_plan(script: Path, after: str, sizes: str) -> None:
    imports = "from hftrain.strategies import MeshStrategy\nfrom accelerate import ParallelismConfig\n"
    text = script.read_text(encoding="utf-8").replace(after, f"{after}, {sizes}")
    script.write_text(imports + text, encoding="utf-8")
    assert show_plan(script, ["64"], gpus=8).data["fits"]
