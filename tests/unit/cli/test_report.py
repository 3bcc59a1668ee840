"""`hftrain report`: the page holds the run's numbers, compares runs, and needs nothing but a browser."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from support.tiny import Task, make_arguments, make_rows
from unit.cli.test_curves import write_foreign

from hftrain import Trainer, TrainerCallback
from hftrain.cli.configured import fit
from hftrain.cli.curves import show_curves
from hftrain.cli.facts import show_runs
from hftrain.cli.report import show_report
from hftrain.core.errors import HFTrainError
from hftrain.extras.record import code_version

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
        ["4", "resumed from checkpoint-4; processes: 1, machines: 1; max_steps: 6, before: 4"],
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
        ["Run", "learning_rate"],
        ["fast", "0.1"],
        ["slow", "0.001"],
    ]
    found = curves(page)
    assert {"slow", "fast"} <= found.keys()
    assert min(found["fast: eval_loss"]["value"]) < min(found["slow: eval_loss"]["value"])
    assert [row[:3] for row in rows_of(page, "Runs")[1:]] == [[name, "complete", "6 of 6"] for name in ("fast", "slow")]


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
    assert "only training_args.bin, a pickle that is not read" in page
    assert "has no journal.jsonl" in page
    assert rows_of(page, "Evaluations")[1][2] == "0.5"


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    write_foreign(tmp_path / "out", 1, [{"</script><b>x": 1.0, "step": 1}])
    page = write(tmp_path, tmp_path / "out")
    assert "</script><b>x" not in page
    assert "&lt;/script&gt;&lt;b&gt;x" in page


def facts(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", page))


def test_runs_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    first = train(source, max_steps=4)
    train(out, max_steps=6, learning_rate=0.5)
    arguments = make_arguments(out, max_steps=5, save_strategy="steps", save_steps=5)
    second = Trainer(Task(), arguments, train_dataset=make_rows(8), eval_dataset=make_rows(4))
    second.train(resume_from_checkpoint=str(source / "checkpoint-2"))
    page = write(tmp_path, out)
    wanted = {entry["step"]: entry["loss"] for entry in second.state.log_history if "loss" in entry}
    curve = curves(page)["loss"]
    assert dict(zip(curve["step"], curve["value"], strict=True)) == wanted
    assert wanted[1] == first.state.log_history[0]["loss"]
    assert [row[1:] for row in rows_of(page, "Time line")[1:]] == [
        ["2", "resumed from checkpoint-2; processes: 1, machines: 1"],
        ["5", "did all steps"],
    ]
    saved = {row[0]: row[3] for row in rows_of(page, "Checkpoints")[1:]}
    assert saved.pop("checkpoint-5").startswith("20")
    assert set(saved) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert set(saved.values()) == {"by an earlier run in this folder"}
    assert "Another run began in this folder before (1 in all). Only the last one is shown." in page


@pytest.mark.parametrize(
    "line",
    [
        '{"event": ["log"], "at": 1}',
        '{"event": "log", "at": "noon", "entry": {}, "samples": 0, "trained_s": 0, "memory": {}}',
        '{"event": "log", "at": 1, "entry": 5, "samples": 0, "trained_s": 0, "memory": {}}',
        '{"event": "begin", "at": NaN, "step": 0}',
        '{"event": "lo',
        "[" * 100_000,
    ],
)
def test_damaged_lines_of_the_journal_are_counted(line: str, tmp_path: Path) -> None:
    train(tmp_path / "out", max_steps=2)
    path = tmp_path / "out/journal.jsonl"
    page = write(tmp_path, tmp_path / "out")
    assert "incomplete or damaged" not in page
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first}\n{line}\n{rest}")
    damaged = write(tmp_path, tmp_path / "out")
    assert "incomplete or damaged, and left out: 1." in damaged
    assert curves(damaged) == curves(page)


def test_file_url_is_its_folder(tmp_path: Path) -> None:
    train(tmp_path / "out", max_steps=2)
    show_report([f"file://{tmp_path}/out"], output=str(tmp_path / "page.html"))
    assert facts((tmp_path / "page.html").read_text())["Steps"] == "2 of 2"


DAMAGED = (None, True, "text", "\ud800", -1, 10**400, 1e308, math.nan, [], [{}], {}, {"a": [None]})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON data; of a list, those of the first two members."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, member in members:
        yield from places(member, (*path, key))


def damage(text: str, path: tuple[Any, ...], value: Any) -> str:
    whole = {"": json.loads(text)}
    owner: Any = whole
    for key in ("", *path)[:-1]:
        owner = owner[key]
    owner[("", *path)[-1]] = value
    return json.dumps(whole[""])


def test_any_damaged_value_is_left_out_or_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    train(tmp_path / "out", max_steps=2)
    choose = random.Random(0)
    for name in ("journal.jsonl", "checkpoint-2/trainer_state.json"):
        path = tmp_path / "out" / name
        whole = path.read_text()
        units = whole.splitlines() if name.endswith("jsonl") else [whole]
        cases = [(unit, place) for unit, text in enumerate(units) for place in places(json.loads(text))]
        for unit, place in choose.choices(cases, k=60):
            lines = list(units)
            lines[unit] = damage(units[unit], place, choose.choice(DAMAGED))
            path.write_text("\n".join(lines) + "\n")
            with contextlib.suppress(HFTrainError):
                write(tmp_path, tmp_path / "out")
        path.write_text(whole)


def test_a_flight_log_has_its_spikes_samples_and_times(tmp_path: Path) -> None:
    rows = [{"x": torch.rand(1, 4, 4), "labels": torch.tensor(index % 3)} for index in range(40)]
    rows[30]["x"] = rows[30]["x"] * 1e3

    class Pictures(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 3)

        def forward(self, x: Any, labels: Any) -> Any:
            return (torch.nn.functional.cross_entropy(self.layer(x.flatten(1)), labels),)

    options = {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", "num_train_epochs": 1}
    for name, log in (("a", True), ("b", False)):
        arguments = make_arguments(tmp_path / name, save_steps=20, save_strategy="steps", **options)
        Trainer(Pictures(), arguments, train_dataset=rows, flight_log=log).train()
    text = write(tmp_path, tmp_path / "a", tmp_path / "b")
    assert text.count("<h2>Flight log</h2>") == 1
    assert "40 steps." in text
    assert "Samples behind them" in text
    assert "Where the time of a step went" in text
    assert '<td class="number">31</td>' in text
    assert "data:image/png;base64,iVBOR" in text


def test_runs_of_other_tasks_differ_and_their_code_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=tmp_path / "code", check=True)

    (tmp_path / "code").mkdir()
    code = tmp_path / "code/task.py"
    code.write_text("from support.tiny import Task\n\ndef make(act: str = 'relu') -> Task:\n    return Task()\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert code_version(tmp_path) is None
    pytest.importorskip("jsonargparse")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(code), raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "hidden"])
    options = ["--args.max_steps=2", "--args.save_steps=1", "--args.use_cpu=true", "--args.report_to=none"]
    for act in ("relu", "tanh"):
        made = {"--task.act": act, "--args.output_dir": tmp_path / act}
        words = [*options, *(f"{name}={value}" for name, value in made.items())]
        fit(resolve_name("task:make"), lambda: {"train_dataset": make_rows(8)}, argv=words)
        code.write_text("changed")
        code_version.cache_clear()
    page = write(tmp_path, tmp_path / "relu", tmp_path / "tanh")
    first, second = (dict(rows_of(write(tmp_path, tmp_path / act), "Environment")) for act in ("relu", "tanh"))
    assert (first["task.act"], second["task.act"]) == ("relu", "tanh")
    assert (len(first["code"]), second["code"]) == (40, f"{first['code']}-dirty")
    assert (first["seed"], int(first["parameters"])) == ("42", sum(each.numel() for each in Task().parameters()))
    assert first["command"] == "train.py --hub_token ***"
    assert "relu" in page.split("Arguments that differ between the runs")[1].split("</table>")[0]


def test_runs_are_listed_with_what_became_of_them(tmp_path: Path) -> None:
    class Failing(Task):
        def training_step(self, batch: Any) -> Any:
            if self.step == 3:
                raise ValueError("broken")
            return super().training_step(batch)

    class Stopping(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    train(tmp_path / "sweep/done")
    for name, task, callbacks in (("failed", Failing(), []), ("stopped", Task(), [Stopping])):
        arguments = make_arguments(tmp_path / "sweep" / name, max_steps=6, save_strategy="steps", save_steps=1)
        with contextlib.suppress(ValueError):
            Trainer(task, arguments, train_dataset=make_rows(8), callbacks=callbacks).train()
    shutil.copytree(tmp_path / "sweep/done", tmp_path / "sweep/going")
    journal = tmp_path / "sweep/going/journal.jsonl"
    begin = json.loads(journal.read_text().splitlines()[0])
    journal.write_text(json.dumps({**begin, "at": time.time()}) + "\n")
    shutil.copytree(tmp_path / "sweep/going", tmp_path / "sweep/gone")
    (tmp_path / "sweep/gone/journal.jsonl").write_text(json.dumps({**begin, "at": time.time() - 7200}) + "\n")
    answer = show_runs(str(tmp_path / "sweep"))
    found = {run["run"]: (run["state"], run["step"]) for run in answer.data["runs"]}
    assert found == {
        "done": ("finished", "6 of 6"),
        "failed": ("failed: ValueError: broken", "3 of 6"),
        "going": ("running", "0 of 6"),
        "gone": ("no end, silent for 2 h 0 min", "0 of 6"),
        "stopped": ("stopped: a callback set should_training_stop", "2 of 6"),
    }
    assert re.match(r"done +finished +6 of 6 +eval_loss 0?\.?[\d.]+ at step \d +", answer[1])
    with pytest.raises(HFTrainError, match="holds none"):
        show_runs(str(tmp_path / "sweep/done/checkpoint-6/nothing"))


@pytest.mark.parametrize("flight_log", [False, True])
def test_run_without_logs_is_drawn_from_its_flight_log_or_says_what_to_set(tmp_path: Path, flight_log: bool) -> None:
    arguments = make_arguments(tmp_path / "out", max_steps=4, logging_steps=500, save_strategy="steps", save_steps=4)
    Trainer(Task(), arguments, train_dataset=make_rows(8), flight_log=flight_log).train()
    page = write(tmp_path, tmp_path / "out")
    if flight_log:
        assert curves(page)["loss"]["step"] == [1, 2, 3, 4]
        return
    assert "out has logged nothing in 4 steps, with logging_steps=500. Set a smaller logging_steps" in page
    with pytest.raises(HFTrainError, match="Set a smaller logging_steps") as caught:
        show_curves([str(tmp_path / "out")])
    assert "Wait" not in str(caught.value)
