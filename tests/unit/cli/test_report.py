"""`hftrain report`: the page holds the run's numbers, compares runs, and needs nothing but a browser."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Task, make_arguments, make_rows
from unit.cli.test_curves import write_foreign

from hftrain import Trainer
from hftrain.cli.report import show_report

pytest.importorskip("plotly")
pytest.importorskip("jinja2")


def train(folder: Path, resume: bool | None = None, **settings: Any) -> Trainer:
    settings = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, **settings}
    arguments = make_arguments(folder, **{"save_strategy": "steps", **settings})
    trainer = Trainer(Task(), arguments, train_dataset=make_rows(8), eval_dataset=make_rows(4))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def write(folder: Path, *runs: Path) -> str:
    page = folder / "report.html"
    (line,) = show_report([str(run) for run in runs], output=str(page))
    assert line.startswith(f"Wrote {page} (")
    return page.read_text()


def curves(page: str) -> dict[str, dict[str, Any]]:
    text = re.search(r"^const panels = (.*);$", page, re.MULTILINE)
    assert text is not None
    return {curve["label"]: curve for panel in json.loads(text[1]) for curve in panel["curves"]}


def rows_of(page: str, title: str) -> list[list[str]]:
    section = page.split(f"<h2>{title}</h2>")[1].split("</table>")[0]
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr.*?</tr>", section, re.DOTALL)]


def test_curves_are_those_of_the_saved_state(tmp_path: Path) -> None:
    train(tmp_path / "out")
    state = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_text())["log_history"]
    found = curves(write(tmp_path, tmp_path / "out"))
    for metric in ("loss", "learning_rate", "grad_norm"):
        saved = [(entry["step"], entry[metric], entry["epoch"]) for entry in state if metric in entry]
        curve = found[metric]
        assert list(zip(curve["step"], curve["value"], curve["epoch"], strict=True)) == saved
        assert len(saved) == 6
    assert found["eval_loss"]["step"] == [2, 4, 6]
    assert len(found["samples_per_s"]["value"]) == len(found["host_memory_gb"]["value"]) == 6
    assert all(value > 0 for value in found["samples_per_s"]["value"])


def test_tables_tell_best_arguments_checkpoints_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(out, max_steps=4, learning_rate=0.125, save_total_limit=1)
    trainer = train(out, True, learning_rate=0.125, save_total_limit=1)
    page = write(tmp_path, out)
    evaluated = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    head, *rows = rows_of(page, "Evaluations")
    assert head[:3] == ["step", "epoch", "eval_loss"]
    assert [[row[0], row[2]] for row in rows] == [[str(step), f"{loss:.5g}"] for step, loss in evaluated.items()]
    best = min(evaluated, key=evaluated.__getitem__)
    marked = re.findall(r'<tr class="best">\s*<td class="number">(\d+)</td>', page)
    assert marked == [str(best)]
    arguments = dict(rows_of(page, "Arguments that differ from their defaults"))
    assert (arguments["learning_rate"], arguments["save_total_limit"]) == ("0.125", "1")
    assert "adam_beta1" not in arguments
    happened = [row[1:] for row in rows_of(page, "Time line")[1:]]
    assert happened == [
        ["0", "began; processes: 1, machines: 1"],
        ["4", "did all steps"],
        ["4", "resumed from checkpoint-4; processes: 1, machines: 1"],
        ["6", "did all steps"],
    ]
    saved = {row[0]: row for row in rows_of(page, "Checkpoints")[1:]}
    assert [name for name, row in saved.items() if row[3].endswith("deleted since")] == ["checkpoint-2", "checkpoint-4"]
    size = sum(file.stat().st_size for file in (out / "checkpoint-6").iterdir())
    assert saved["checkpoint-6"][2] == f"{size / 1000:.3g} kB"
    assert "torch" in dict(rows_of(page, "Environment"))


def test_runs_are_compared(tmp_path: Path) -> None:
    for name, rate in (("slow", 0.001), ("fast", 0.1)):
        train(tmp_path / name, learning_rate=rate)
    page = write(tmp_path, tmp_path / "slow", tmp_path / "fast")
    assert rows_of(page, "Arguments that differ between the runs") == [
        ["Argument", "slow", "fast"],
        ["learning_rate", "0.001", "0.1"],
    ]
    assert {"slow", "fast", "slow: eval_loss", "fast: eval_loss"} <= curves(page).keys()
    assert [row[:3] for row in rows_of(page, "Runs")[1:]] == [[name, "complete", "6 of 6"] for name in ("slow", "fast")]


def test_run_of_transformers_is_shown_without_reading_its_pickle(tmp_path: Path) -> None:
    entries = [
        {"loss": math.nan if step == 20 else 1 / step, "epoch": step / 10, "step": step} for step in (10, 20, 30)
    ]
    write_foreign(tmp_path / "out", 30, [*entries, {"eval_loss": 0.5, "eval_runtime": 1.0, "step": 30}])
    train(tmp_path / "ours")
    page = write(tmp_path, tmp_path / "out", tmp_path / "ours")
    assert "Not known of out." in page
    page = write(tmp_path, tmp_path / "out")
    assert "NaN or infinite at step 20" in page
    assert "the checkpoints hold them as a pickle, which is not read" in page
    assert "has no journal.jsonl" in page
    assert rows_of(page, "Evaluations")[1][2] == "0.5"


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    write_foreign(tmp_path / "out", 1, [{"</script><b>x": 1.0, "step": 1}])
    page = write(tmp_path, tmp_path / "out")
    assert "</script><b>x" not in page
    assert "&lt;/script&gt;&lt;b&gt;x" in page


def test_long_run_stays_quick_and_small(tmp_path: Path) -> None:
    entries = [
        {"loss": math.exp(-step / 9000), "learning_rate": 0.1, "epoch": 1.0, "step": step} for step in range(50_000)
    ]
    entries[31_000]["loss"] = 77.0
    write_foreign(tmp_path / "short", 1, entries[:1])
    write_foreign(tmp_path / "long", 50_000, entries)
    short = len(write(tmp_path, tmp_path / "short"))
    start_s = time.perf_counter()
    page = write(tmp_path, tmp_path / "long")
    assert time.perf_counter() - start_s < 15
    assert len(page) - short < 400_000
    curve = curves(page)["loss"]
    assert len(curve["step"]) < 2500
    assert (31_000, 77.0) in zip(curve["step"], curve["value"], strict=True)
