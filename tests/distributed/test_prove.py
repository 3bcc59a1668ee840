"""`hftrain prove` on scripts that are right, and on scripts with one fault each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hftrain.cli.commands import main
from hftrain.extras.prove.claims import Recording, compare
from hftrain.extras.prove.recording import fingerprints

pytestmark = pytest.mark.distributed

SCRIPT = """
import os, sys
import torch
from torch import nn
from hftrain import Trainer, TrainingArguments

class Net(nn.Module):
    main_input_name = "x"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x, labels, num_items_in_batch=None):
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / (num_items_in_batch or len(labels))
        return {"loss": loss, "logits": logits}

FACTORS = {
    "rank": lambda x: 1 + int(os.environ.get("RANK", 0)) + 0 * torch.rand(()),
    "length": len,
    "draws": lambda x: 1 + torch.rand(len(x)).mean(),
}
rate, fault = float(sys.argv[1]), sys.argv[2]

class Faulty(Trainer):
    def get_batch_samples(self, *args):
        batches, count = super().get_batch_samples(*args)
        return batches, count / 2 if fault == "count" and "RANK" in os.environ else count

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss * FACTORS.get(fault, lambda x: 1)(inputs["x"])
        return (loss, outputs) if return_outputs else loss

rows = [{"x": torch.randn(4), "labels": number % 3} for number in range(100)]
args = TrainingArguments("run", per_device_train_batch_size=4, learning_rate=rate, report_to="none")
Faulty(Net(), args, train_dataset=rows, eval_dataset=rows[:70]).train()
"""


def prove(tmp_path: Path, fault: str, *options: str) -> tuple[int, dict[str, tuple[str, str]], list[str]]:
    """Return the exit status, what was found of each claim, and the limits."""
    script, page = tmp_path / "train.py", tmp_path / "proof.md"
    script.write_text(SCRIPT, encoding="utf-8")
    status = 0
    try:
        main(["prove", str(script), *options, "--output", str(page), "--", "0.01", fault])
    except SystemExit as end:
        status = int(end.code or 0)
    found = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert all(each["name"] in page.read_text(encoding="utf-8") for each in found["claims"])
    return status, {each["name"]: (each["status"], each["found"]) for each in found["claims"]}, found["limits"]


def test_a_right_script_holds_and_the_proof_says_what_it_would_not_see(tmp_path: Path) -> None:
    status, claims, limits = prove(tmp_path, "none", "--against", "fsdp")
    assert status == 0
    assert {f"ddp on 2 processes: {what} as in fsdp" for what in ("item counts", "five steps")} <= claims.keys()
    names = [name for name, (state, _) in claims.items() if state != "PASS"]
    assert len(claims) >= 16
    assert [name for name in names if name != "as transformers' Trainer"] == [
        "would see on one side: the mask of one sample for all",
        "would see on one side: tied weights that are untied",
    ]
    assert limits[1:] == [
        "Only the first 61 of 70 samples were evaluated.",
        "Dropout was off in 1 places, except when resuming to the bit; its masks were not compared.",
        "No batch has padding, so masks were not proved.",
    ]


@pytest.mark.parametrize(
    ("fault", "claim", "verdict", "found"),
    [
        ("rank", "ddp on 2 processes: five steps as in one", "FAIL", "step 1: loss is "),
        ("count", "ddp on 2 processes: item counts as in one", "FAIL", " is 4, not 8: 0.5 times (1 / the number of "),
        ("length", "one micro-batch as four", "FAIL", "step 1: loss is "),
        ("draws", "one micro-batch as four", "not here", "The model draws random"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: str, claim: str, verdict: str, found: str) -> None:
    status, claims, _ = prove(tmp_path, fault)
    assert status == (verdict == "FAIL")
    assert claims[claim][0] == verdict
    assert found in claims[claim][1]
    assert (claims["ddp on 2 processes: five steps as in one"][0] == "FAIL") == (fault == "rank")


def test_padding_is_no_part_of_a_sample_and_hides_no_other() -> None:
    padded, alone = torch.tensor([[5, 6, 0], [5, 6, 7]]), torch.tensor([[5, 6]])
    assert fingerprints({"ids": padded})[:1] == fingerprints({"ids": alone})
    assert len({*fingerprints({"ids": padded}), *fingerprints({"ids": torch.tensor([[0, 5], [5, 0], [6, 5]])})}) == 5
    left = {"ids": torch.tensor([[9, 5, 6]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    assert fingerprints(left) == fingerprints({"ids": alone, "attention_mask": torch.ones(1, 2, dtype=torch.long)})
    assert fingerprints({"labels": padded}) != fingerprints({"labels": alone})  # where only -100 is padding


def record(folder: Path, **numbers: torch.Tensor) -> Recording:
    folder.mkdir()
    (folder / "rank0.json").write_text('{"samples": {"1": ["a", "b"]}, "data_rank": 0}', encoding="utf-8")
    kinds = {"loss": "loss/1/", "gradient": "gradient/1/net.weight", "metric": "metric/1/accuracy"}
    save_file({kinds[kind]: value.double() for kind, value in numbers.items()}, folder / "rank0.safetensors")
    return Recording(folder)


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        ([2.0, 4.0], "is 2 times what it should be (the number of processes)"),
        ([0.25, 0.5], "is 0.25 times what it should be (1 / the number of micro-batches)"),
        ([3.0, 6.0], "is 3 times what it should be"),
        ([1.0, 2.001], "differs by 4.5e-04 of its norm"),
        ([1.0, 2.0, 0.0], "has the shape [3], not [2]"),
        ([1.0, 2.0 + 1e-7], None),
    ],
)
def test_how_a_tensor_differs_is_said(tmp_path: Path, gradient: list[float], found: str | None) -> None:
    loss = torch.tensor(1.0)
    one = record(tmp_path / "one", loss=loss, gradient=torch.tensor(gradient, dtype=torch.float64))
    two = record(tmp_path / "two", loss=loss, gradient=torch.tensor([1.0, 2.0]))
    difference = compare(one, two, {"the number of processes": 2, "the number of micro-batches": 4}, bound=1e-6)
    assert difference == (found and (1, "gradient net.weight", found))
    assert compare(one, one, {}, bound=1e-6, kinds=()) == (1, "no number", "was written down by both")
