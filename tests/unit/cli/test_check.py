"""`hftrain check`: everything holds here, and each line fails when its fault is planted."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hftrain import Trainer
from hftrain.cli import commands
from hftrain.extras.background import HostCopies
from hftrain.extras.check import probes, proofs
from hftrain.run import contents
from hftrain.storage.locks import FolderLock
from hftrain.strategies.distributed import DistributedStrategy

PROOFS = [
    "device", "numbers in float32", "numbers in bfloat16", "resume", "background save", "folder", "waits",
    "cost of a step", "processes", "ddp", "fsdp",
]  # fmt: skip


def test_every_proof_holds_here(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "check.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "_MAX_COST_RATIO", 100.0)  # a machine that is busy with other tests says nothing
        commands.main(["check", "--output-dir", str(tmp_path / "runs"), "--output", str(report)])
    found = json.loads(report.read_text(encoding="utf-8"))["proofs"]
    assert [each["name"] for each in found] == PROOFS
    assert {each["status"] for each in found} == {"PASS"}, found
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["PASS"] * len(PROOFS)
    assert not [*(tmp_path / "runs").iterdir()]


def prove() -> dict[str, str]:
    return {each.name: each.status for each in proofs.prove_all(None)}


@pytest.mark.distributed
def test_a_launcher_proves_all_its_processes_together(run_distributed: Any) -> None:
    alone = ("waits", "cost of a step")
    expected = {name: "not here" if name in alone else "PASS" for name in PROOFS}
    assert run_distributed(prove) == [expected, expected]


def waits(self: Any, *args: Any, **options: Any) -> Any:
    """Read the loss of each step."""
    loss = TRAINING_STEP(self, *args, **options)
    loss.item()
    return loss


def sleeps(self: Any, *args: Any, **options: Any) -> Any:
    time.sleep(0.02)
    return TRAINING_STEP(self, *args, **options)


TRAINING_STEP, BY_HAND = Trainer.training_step, probes.train_by_hand
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "numbers in float32": (proofs, "train_by_hand", lambda device, ranks, cast: BY_HAND(device, 2), "differ by"),
    "numbers in bfloat16": (proofs, "train_by_hand", lambda device, ranks, cast: BY_HAND(device, 2), "differ by"),
    "resume": (contents, "restore_rng", lambda state: None, "the resumed run differs"),
    "background save": (HostCopies, "copy", lambda self, tree: tree, "holds other weights"),
    "folder": (FolderLock, "take", lambda self: None, "a second process could lock"),
    "waits": (Trainer, "training_step", waits, "waits: aten::_local_scalar_dense 1"),
    "cost of a step": (Trainer, "training_step", sleeps, "ms, by hand"),
    "processes": (DistributedStrategy, "reduce", lambda self, tensor, op="mean": tensor, "sum up wrongly"),
    "ddp": (proofs, "train_by_hand", lambda device, ranks: BY_HAND(device, 1), "differ by"),
    "fsdp": (proofs, "train_by_hand", lambda device, ranks: BY_HAND(device, 1), "differ by"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_line_fails_when_its_fault_is_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, fault, found = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    if name == "background save":  # the training overtakes it
        monkeypatch.setattr(HostCopies, "fence", lambda self: partial(time.sleep, 0.3))
    outcome = next(each for each in proofs.prove_all(None, only=name))
    assert outcome.status == "FAIL", outcome
    assert found in outcome.found
    assert outcome.remedy


def test_a_failure_decides_the_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(folder: Path) -> str:
        raise KeyError("no such thing")

    monkeypatch.setattr(proofs, "PROOFS", {"resume": crash})
    with pytest.raises(SystemExit, match="1"):
        commands.main(["check"])
    assert "FAIL      resume  KeyError: 'no such thing'" in capsys.readouterr().out
