"""`hftrain capsule` and `hftrain open`, on runs of scripts in processes of their own."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hftrain import ConfigError
from hftrain.cli.capsule import show_capsule, show_open

NET = """
from torch import nn
from torch.nn.functional import cross_entropy
from hftrain import Trainer
from losses import scaled


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU()
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(16, 3)

    def forward(self, x, labels):
        logits = self.last(self.drop(self.act(self.norm(self.first(x)))))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Scaled(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return scaled(model(**inputs)["loss"])


def make(args, **options):
    return Scaled(Net(), args, **options)
"""
DROPOUT = """
import sys
import torch
from hftrain import TrainingArguments, set_seed
from net import make

set_seed(0)
args = TrainingArguments(
    "run", max_steps=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=3, report_to="none",
    disable_tqdm=True, use_cpu=True, max_grad_norm=0.5, learning_rate=1e-2, fp16="--fp16" in sys.argv, weight_decay=0.1,
)
make(args, train_dataset=torch.load("data.pt"), flight_log=True).train()
"""
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from hftrain import Trainer, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
    attention_dropout=0.2, attn_implementation="eager", tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
model.model.layers[0].mlp.requires_grad_(False)


def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence([each["ids"] for each in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


args = TrainingArguments(
    "run", max_steps=6, per_device_train_batch_size=3, gradient_accumulation_steps=2, save_steps=4, report_to="none",
    disable_tqdm=True, use_cpu=True, remove_unused_columns=False, bf16=True,
)
Trainer(model, args, train_dataset=torch.load("data.pt"), data_collator=collate, flight_log=True).train()
"""


def train(home: Path, script: str, *words: str, **options: Any) -> Path:
    """Train in a folder, and return a capsule of step 5 that lies elsewhere; the run and its data are deleted."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (48,), generator=generator).tolist()
    rows = [{"x": torch.randn(8, generator=generator), "labels": torch.tensor(n % 3)} for n in lengths]
    texts = [{"ids": torch.randint(1, 32, (n,), generator=generator)} for n in lengths]
    code, scaled = home / "code", "def scaled(loss):\n    return 2 * loss\n"
    code.mkdir()
    torch.save(texts if script is LLAMA else rows, code / "data.pt")
    for name, text in {"train.py": script, "net.py": NET, "losses.py": scaled}.items():
        (code / name).write_text(text)
    command = [sys.executable, "train.py", "--hub-token", "s3cret", *words]
    subprocess.run(command, cwd=code, check=True, capture_output=True)
    for name in ("net", "losses"):
        sys.modules.pop(name, None)
    given: dict[str, Any] = {"step": 5, "output": str(home / "a.capsule")}
    if script is not LLAMA:
        with pytest.raises(ConfigError, match=r"its Scaled with a Net is made\. .* --make FILE.py:"):
            show_capsule(str(code / "run"), **given)
        options["make"] = f"{code / 'net.py'}:make"
    answer = show_capsule(str(code / "run"), **given, **options)
    assert (answer.status, "same to the bit" in answer.data["opened"]) == (0, True), answer
    assert b"s3cret" not in (home / "a.capsule").read_bytes()
    shutil.rmtree(code / "run")
    (code / "data.pt").unlink()
    return home / "a.capsule"


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("dropout"), DROPOUT, has_source=True)


def opened(path: Path, **options: Any) -> Any:
    sys.modules.pop("losses", None)
    return show_open(str(path), **options)


def test_step_of_a_script_is_the_same_to_the_bit_and_nothing_is_unpickled(
    capsule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, None)
    answer = opened(capsule, code=str(capsule.parent / "code"))
    assert answer.data == {"said": "PASS  67 numbers are the same to the bit", "notes": []}


def test_step_with_scaled_losses_without_optimizer(tmp_path: Path) -> None:
    answer = opened(train(tmp_path, DROPOUT, "--fp16", has_optimizer=False), code=str(tmp_path / "code"))
    assert "same to the bit" in answer[1]
    assert "The update was not compared" in answer[2]
    assert "is not in the capsule" in opened(tmp_path / "a.capsule")[-1]


def test_step_of_a_transformers_model_needs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    path = train(tmp_path, LLAMA)
    shutil.rmtree(tmp_path / "code")
    monkeypatch.chdir(tmp_path)
    assert "same to the bit" in opened(path)[1]
    with pytest.raises(ConfigError, match="it needs no code"):
        opened(path, code=".")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("nn.GELU()", "nn.ReLU()", "micro-batch 1, forward, act (GELU) was expected"),
        ("nn.Dropout(0.2)", "nn.Dropout(0.5)", "micro-batch 1, forward, drop (Dropout): "),
        ("cross_entropy(logits, labels)", "cross_entropy(logits, labels.roll(1))", "1, forward, (the model) (Net): "),
        ('["loss"])', '["loss"] + 0.1)', "loss of micro-batch 1: "),
        ("return Scaled(", "args.max_grad_norm = 0.1; return Scaled(", "the gradient of last.bias (Parameter): "),
        ("self.act(self", "self.act(1.0000001 * self", "PASS  67 numbers are the same up to rounding"),
    ],
)
def test_change_of_the_code_is_named(capsule: Path, tmp_path: Path, old: str, new: str, where: str) -> None:
    shutil.copytree(capsule.parent / "code", tmp_path / "code")
    file = tmp_path / "code" / "net.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    answer = opened(capsule, code=str(tmp_path / "code"))
    assert answer[2:] == ["net.py is not as it was."]
    assert where in answer.data["said"]
    assert answer.status == (not where.startswith("PASS"))


def forged(capsule: Path, path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    with safe_open(capsule, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = json.loads(file.metadata()["hftrain.capsule.1"])
    named = dict(parts["dict"])
    change(named, tensors)
    save_file(tensors, path, {"hftrain.capsule.1": json.dumps({"dict": [*named.items()]})})
    return path


def test_changed_weight_is_named(capsule: Path, tmp_path: Path) -> None:
    path = forged(capsule, tmp_path / "b", lambda _, tensors: tensors["/weights/model.first.weight"][3, 5].mul_(1.01))
    answer = opened(path, code=str(capsule.parent / "code"))
    assert answer.status == 1
    assert answer.data["said"].startswith("FAIL  model.first.weight before the step: ")
    assert "was expected, and is" in answer.data["said"]


def test_source_is_shown_and_not_run_without_the_option(capsule: Path, tmp_path: Path) -> None:
    def spoil(parts: dict[str, Any], _: Any) -> None:
        parts["code"]["dict"][0][1][0] = f"open({str(tmp_path / 'ran')!r}, 'w')\n1\x1b[2J\n"

    path = forged(capsule, tmp_path / "b", spoil)
    for answer in (opened(path), opened(path, code=str(tmp_path))):
        assert answer.status == 1
        assert "class Net(nn.Module):" in answer
        assert "1\\x1b[2J" in answer
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SyntaxError):  # it is run now
        opened(path, runs_source=True)
    assert "same to the bit" in opened(capsule, runs_source=True)[1]


@pytest.mark.parametrize("name", ["../net.py", "a/../../net.py", "/net.py", "C:\\net.py", "..\\net.py", "net.txt"])
def test_names_of_files_elsewhere_are_refused(capsule: Path, tmp_path: Path, name: str) -> None:
    def rename(parts: dict[str, Any], _: Any) -> None:
        parts["code"]["dict"][0][0] = name

    for change in (rename, lambda parts, _: parts.update(make=f"{name}:make")):
        with pytest.raises(ConfigError, match="not Python files in a folder"):
            opened(forged(capsule, tmp_path / "b", change), runs_source=True)


def test_damaged_file_is_refused(capsule: Path, tmp_path: Path) -> None:
    whole = capsule.read_bytes()
    for content in (whole[:-100], whole[:50], b"", b"PK" + whole):
        (tmp_path / "b").write_bytes(content)
        with pytest.raises(ConfigError, match="damaged, or not a capsule"):
            opened(tmp_path / "b")
    path = forged(capsule, tmp_path / "c", lambda parts, _: parts["weights"]["dict"].pop())
    with pytest.raises(ConfigError, match=r"not those of the model: model\.norm\.num_batches"):
        opened(path, code=str(capsule.parent / "code"))


def test_step_of_several_processes_is_refused(tmp_path: Path) -> None:
    lines = {"begin": 0, "world_size": 2, "strategy": "ddp", "command": [], "folder": ""}, {"step": 1}
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match=r"strategy='ddp', processes: 2\. Use hftrain replay"):
        show_capsule(str(tmp_path), step=1)


def test_debugger_opens_in_a_module(capsule: Path) -> None:
    code = str(capsule.parent / "code")
    words = [sys.executable, "-c", "from hftrain.cli.commands import main; main()", "open", str(capsule), "--at", "act"]
    done = subprocess.run([*words, "--code", code], input="s\np input.shape\nc\n", capture_output=True, text=True)
    assert "torch.Size([4, 16])" in done.stdout
    assert "same to the bit" in done.stdout
    with pytest.raises(ConfigError, match="Did you mean 'act'"):
        opened(capsule, code=code, at="act_")
