"""`hftrain curves`, on folders that real runs have left and on one as transformers' Trainer leaves it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Task, make_arguments, make_rows

from hftrain import ConfigError, MissingDependencyError, Trainer
from hftrain.cli.commands import main
from hftrain.cli.curves import show_curves
from hftrain.cli.runs import read_runs, thinned


def train(folder: Path, **settings: Any) -> Trainer:
    settings = {"max_steps": 6, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, **settings}
    arguments = make_arguments(folder, save_strategy="steps", save_steps=3, **settings)
    trainer = Trainer(Task(), arguments, train_dataset=make_rows(8), eval_dataset=make_rows(4))
    trainer.train()
    return trainer


def write_foreign(folder: Path, step: int, entries: list[dict[str, Any]]) -> None:
    """Leave the files of a checkpoint of transformers' Trainer that say what was logged."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": entries}))
    (checkpoint / "training_args.bin").write_bytes(b"a pickle, which is never read")


def test_points_are_those_of_the_history(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    (run,) = read_runs([str(tmp_path)])
    for metric in ("loss", "eval_loss", "learning_rate", "grad_norm"):
        logged = [(entry["step"], entry[metric]) for entry in trainer.state.log_history if metric in entry]
        assert run.points(metric) == logged
        assert len(logged) == (2 if metric == "eval_loss" else 6)
    assert (run.subject("eval_loss"), run.subject("loss"), run.subject("eval_size")) == ("loss", "loss", "size")


def test_terminal_shows_losses_in_one_panel_and_what_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotext")
    monkeypatch.setenv("COLUMNS", "60")
    entries = [{"loss": math.nan if step == 2 else 1 / step, "step": step} for step in range(1, 9)]
    write_foreign(tmp_path / "out", 8, [*entries, {"eval_loss": 0.3, "eval_runtime": 1.0, "step": 8}])
    lines = show_curves([str(tmp_path / "out")])
    assert "loss" in lines[0]
    assert "eval_loss" in "\n".join(lines)
    assert max(map(len, lines)) <= 60
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "loss: 1 of 8 values are NaN or infinite"


def test_picture_of_two_runs_names_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, scale in (("a", 1.0), ("b", 2.0)):
        write_foreign(tmp_path / name, 3, [{"loss": scale / step, "step": step} for step in (1, 2, 3)])
    folders, picture = [str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "curves.svg"
    assert show_curves(folders, output=str(picture)) == [f"Wrote {picture}"]
    text = picture.read_text()
    assert "a: loss" in text
    assert "b: loss" in text
    show_curves(folders, output=str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text() == text


def test_thinned_curve_keeps_its_extremes() -> None:
    points = [(float(step), math.sin(step)) for step in range(50_000)]
    points[777] = (777.0, 99.0)
    points[40_001] = (40_001.0, math.nan)
    kept = [points[place] for place in thinned([value for _, value in points], 1000)]
    assert len(kept) <= 1100
    assert kept == sorted(kept, key=lambda point: point[0])
    assert (777.0, 99.0) in kept
    assert any(math.isnan(value) for _, value in kept)
    assert thinned([value for _, value in points[:1000]], 1000) == list(range(1000))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "There is no such folder. Name the output_dir of a run."),
        (["."], "It holds no readable journal.jsonl or trainer_state.json. Name the output_dir of a run."),
        (["out", "--metric", "losss"], "No run has logged it. Did you mean 'loss'?"),
        (["out", "-o", "curves.jpeg"], "Its suffix is not one of .png, .svg, .pdf."),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_foreign(tmp_cwd / "out", 1, [{"loss": 1.0, "step": 1}])
    with pytest.raises(SystemExit) as ended:
        main(["curves", *words])
    out, error = capsys.readouterr()
    assert (ended.value.code, out, error.count("\n")) == (1, "", 1)
    assert message in error


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_foreign(tmp_path, 1, [{"loss": 1.0, "step": 1}])
    absent = type("Absent", (), {"__bool__": lambda _: False, "message": "not installed"})()
    monkeypatch.setattr("hftrain.core.extras._cache", lambda requirement: absent)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hftrain\[report\]'"):
        show_curves([str(tmp_path)])


def test_run_without_entries_says_so(tmp_path: Path) -> None:
    write_foreign(tmp_path, 1, [])
    with pytest.raises(ConfigError, match="has logged nothing"):
        show_curves([str(tmp_path)])


def test_picture_takes_any_name_and_a_wrong_place_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_foreign(tmp_path / "out", 2, [{"cost_$\\bad{$": 1.0 / step, "step": step} for step in (1, 2)])
    picture = tmp_path / "picture.svg"
    show_curves([str(tmp_path / "out")], output=str(picture))
    assert "cost_$\\bad{$" in picture.read_text()
    with pytest.raises(ConfigError, match=r"Cannot write .* Give another file with -o"):
        show_curves([str(tmp_path / "out")], output=str(tmp_path / "none/picture.png"))
