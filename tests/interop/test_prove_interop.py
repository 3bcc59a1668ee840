"""`hftrain prove` on a script of transformers' Trainer: what one process has wrong as well, and the Trainer itself."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from hftrain.cli.commands import main

pytestmark = pytest.mark.interop

SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Own(Trainer):  # trains another loss under transformers' Trainer than under hftrain's
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs["loss"] * (FACTOR if Trainer.__module__.startswith("transformers") else 1)
        return (loss, outputs) if return_outputs else loss

torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **sizes))
texts = torch.randint(0, 50, (80, 9))
rows = [{"input_ids": text[:8], "labels": text[SHIFT : 8 + SHIFT]} for text in texts]
args = TrainingArguments("run", per_device_train_batch_size=4, learning_rate=0.01, report_to="none", use_cpu=True)
Own(model, args, train_dataset=rows).train()
"""


@pytest.mark.parametrize(("factor", "shift", "verdict"), [(1, 0, None), (1.5, 1, "FAIL")])
def test_shifted_labels_and_another_loss_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, shift: int, verdict: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FACTOR", str(factor)).replace("SHIFT", str(shift)), encoding="utf-8")
    with pytest.raises(SystemExit, match="1") if verdict else nullcontext():
        main(["prove", str(script), "--json"])
    status = {each["name"]: each["status"] for each in json.loads(capsys.readouterr().out)["claims"]}
    assert status.get("labels are shifted once") == verdict
    assert status["as transformers' Trainer"] == (verdict or "PASS")
    failed = [name for name, each in status.items() if each == "FAIL"]
    assert failed == (["labels are shifted once", "as transformers' Trainer"] if verdict else [])
