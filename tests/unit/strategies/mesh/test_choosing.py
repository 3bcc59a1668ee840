"""A size of "auto": what `hftrain plan` proposes for the script that runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hftrain import ConfigError
from hftrain.strategies.mesh import choosing
from hftrain.strategies.mesh.choosing import choose

SCRIPT = """
import sys
import torch
import transformers
from hftrain import Trainer, TrainingArguments
from hftrain.strategies import MeshStrategy

sizes = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, intermediate_size=512, **sizes))
ids = torch.zeros(int(sys.argv[1]), dtype=torch.long)
args = TrainingArguments("out", use_cpu=True, report_to="none", per_device_train_batch_size=4)
strategy = MeshStrategy(tp_size="auto", dp_replicate=2, use_cpu=True)
print("a script may print")
Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8, strategy=strategy).train()
"""
NONE = {"pp": None, "dp_replicate": None, "dp_shard": None, "cp": None, "tp": None}


def ranks(num: int) -> Any:
    """Return what `choose` needs of a strategy, as the main one of several processes."""
    alike = {"gather_object": lambda value: [value] * num, "broadcast_object": lambda value: value}
    return SimpleNamespace(world_size=num, is_main=True, device_type="cpu", **alike)


@pytest.fixture
def run_script(tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    path = tmp_cwd / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), "64"])
    for name, value in {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))


def test_script_is_planned_as_it_is_set(run_script: None, capsys: pytest.CaptureFixture[str]) -> None:
    best = choose(ranks(8), {**NONE, "dp_replicate": 2, "tp": "auto"}, ("dp_shard",), "1GB")
    assert best["sizes"]["dp_replicate"] == 2
    assert best["sizes"]["tp"] * best["sizes"]["dp_shard"] == 4
    assert (best["micro_batch"], best["checkpointing"], best["offload"]) == (4, False, False)
    assert "The mesh is dp_replicate 2 x" in capsys.readouterr().out


def test_what_cannot_be_planned_is_said_by_name(run_script: None) -> None:
    with pytest.raises(ConfigError, match=r"Cannot train this model on 8 GPUs of 1MB.*tp_size='auto'"):
        choose(ranks(8), {**NONE, "tp": "auto"}, ("dp_shard",), "1MB")


def fit(**sizes: int) -> dict[str, Any]:
    figures = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "temporary"), 1)
    return {"sizes": {**dict.fromkeys(NONE, 1), **sizes}, "options": {}, **figures}


@pytest.mark.parametrize(
    ("given", "uses", "chosen"),
    [
        ({"tp": "auto"}, ("dp_shard",), {"tp": 4}),
        ({"tp": "auto", "dp_shard": 2}, ("dp_shard",), {"tp": 2, "dp_shard": 2}),
        ({"pp": "auto"}, ("dp_shard",), {"pp": 2, "dp_shard": 2}),
        ({"cp": "auto", "tp": 1}, ("dp_shard", "cp"), {"cp": 4}),
        ({"dp_shard": "auto"}, (), {"dp_shard": 4}),
        ({"dp_replicate": "auto", "tp": "auto"}, (), {"dp_replicate": 4}),
    ],
    ids=str,
)
def test_sizes_that_are_named_stay(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], uses: tuple[str, ...], chosen: dict[str, int]
) -> None:
    fits = [fit(dp_replicate=4), fit(pp=2, dp_shard=2), fit(tp=4), fit(tp=2, dp_shard=2), fit(cp=4), fit(dp_shard=4)]
    monkeypatch.setattr(choosing, "_ask", lambda *_: {"fits": fits})
    best = choose(ranks(4), {**NONE, **given}, uses, "1GB")
    assert {dim: size for dim, size in best["sizes"].items() if size > 1} == chosen
    with pytest.raises(ConfigError, match="nothing of these sizes"):
        choose(ranks(4), {**NONE, **given, "cp": 2}, (), "1GB")


def test_notebook_names_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match="Nothing can be run again"):
        choose(ranks(4), {**NONE, "tp": "auto"}, (), None)
