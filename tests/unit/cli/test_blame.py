"""`hftrain blame`, on runs with planted samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_arguments
from torch import nn
from torch.nn import functional as F

from hftrain import ConfigError, FlightLog, Trainer, set_seed
from hftrain.cli.blame import find_spikes, show_blame
from hftrain.cli.commands import main
from hftrain.cli.report import show_report
from hftrain.extras.flight.reading import read_ledger

BAD = (17, 90, 133)


class Pictures(nn.Module):
    """Tell which half of a picture is brighter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make_pictures() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(160, 1, 4, 4, generator=generator)
    labels = (pixels[:, 0, :2].sum((1, 2)) > pixels[:, 0, 2:].sum((1, 2))).long()
    for index in BAD:
        pixels[index] *= 100
        labels[index] = 1 - labels[index]
    pixels[60], labels[60] = pixels[BAD[0]], labels[BAD[0]]  # a twin
    return [{"pixels": pixel, "labels": int(label)} for pixel, label in zip(pixels, labels, strict=True)]


def sample_losses(outputs: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")


def train(folder: Path, *, log: Any = None, resume: Any = False, **options: Any) -> Trainer:
    set_seed(3)
    args = make_arguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.01, save_strategy="steps",
        save_steps=10, max_grad_norm=1.0,
    )  # fmt: skip
    log = FlightLog(sample_losses=sample_losses) if log is None else log
    trainer = Trainer(Pictures(), args, train_dataset=make_pictures(), flight_log=log, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_planted_samples_are_named_shown_and_can_be_left_out(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "exclude.json"
    train(run)
    answer = show_blame(str(run), output=str(path), top=10)
    found = json.loads(path.read_text())
    assert set(BAD) <= set(found) <= {*BAD, 60}
    text = "\n".join(answer)
    assert "sample 17: loss " in text
    assert "same content as 60" in text
    pictures = list((run / "flight" / "spikes").glob("sample*.png"))
    assert {path.stem for path in pictures} >= {f"sample{index}" for index in BAD}
    first = min(each["steps"][0] for each in answer.data["suspects"])
    before = max(step for step in (0, 10, 20) if step < first)
    resume = str(run / f"checkpoint-{before}") if before else False
    again = train(tmp_path / "again", resume=resume, exclude_samples=str(path))
    assert max(entry["loss"] for entry in again.state.log_history if "loss" in entry) < 1
    left = find_spikes(read_ledger(tmp_path / "again"))
    assert all(loss < 2 for loss, _ in left.values())


def test_report_names_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    train(tmp_path / "run")
    show_report([str(tmp_path / "run")], output=str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Steps that stand out" in text
    assert (
        f"{next(iter(find_spikes(read_ledger(tmp_path / 'run'))))}" in text.partition("Steps that stand out")[2][:200]
    )


def test_without_losses_of_samples_micro_batches_are_named(tmp_path: Path) -> None:
    train(tmp_path, log=True)
    answer = show_blame(str(tmp_path))
    assert {each["sample"] for each in answer.data["suspects"]} >= set(BAD)
    assert not any(each["is_own"] for each in answer.data["suspects"])
    assert "FlightLog(sample_losses=...)" in "\n".join(answer)


def test_spikes_are_replayed_for_the_losses_of_their_samples(tmp_cwd: Path) -> None:
    lines = ["import sys", f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})", "from pathlib import Path"]
    lines += ["from unit.cli.test_blame import train", "train(Path('run'), log=True)"]
    Path("script.py").write_text("\n".join(lines))
    subprocess.run([sys.executable, "script.py"], check=True, capture_output=True)
    assert "replay these steps with --replay" in "\n".join(show_blame("run"))
    written = {path for path in tmp_cwd.rglob("*") if path.suffix != ".png"}
    answer = show_blame("run", replay=True)
    assert {path for path in tmp_cwd.rglob("*") if path.suffix != ".png"} == written
    ledger = read_ledger("run")
    first = list(find_spikes(ledger))[:3]
    assert answer[0] == f"Replayed steps {', '.join(map(str, first))}."
    assert [each["step"] for each in answer.data["spikes"]] == first
    norms = [each["norm"] for each in answer.data["suspects"]]
    assert norms == sorted(norms, reverse=True)
    assert all(each["is_own"] for each in answer.data["suspects"])
    found = {each["sample"] for each in answer.data["suspects"]}
    planted = {each for step in first for each in ledger[step][0]["samples"][0]} & {*BAD, 60}
    assert found == planted != set()
    assert "gradient norm" in "\n".join(answer)


def test_command_prints_lines_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    main(["blame", str(tmp_path), "--top", "1"])
    assert "is a spike: loss" in capsys.readouterr().out
    main(["blame", str(tmp_path), "--step", "3", "--json"])
    assert json.loads(capsys.readouterr().out)["spikes"][0]["step"] == 3


def test_runs_that_cannot_be_blamed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flight_log=True"):
        show_blame(str(tmp_path))
    train(tmp_path)
    with pytest.raises(ConfigError, match="steps 1 to 80"):
        show_blame(str(tmp_path), step=81)


def test_calm_runs_have_nothing_to_blame(tmp_path: Path) -> None:
    folder = tmp_path / "flight"
    folder.mkdir()
    lines = [{"step": step, "samples": [[step]], "losses": [1 + step % 3 / 10], "norm": 1.0} for step in range(1, 60)]
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert show_blame(str(tmp_path)) == ["No step stands out from those before it."]
    lines[40]["losses"] = [float("nan")]
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert show_blame(str(tmp_path)).data["suspects"][0]["sample"] == 41
