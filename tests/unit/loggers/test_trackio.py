"""What Trackio's database holds; nothing is synchronised with a Space here."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.trackers import logged, needs, train

pytestmark = needs("trackio")


def rows(path: Path, name: str) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(path)) as database:
        found = database.execute("SELECT step, metrics FROM metrics ORDER BY step, id").fetchall()
    pairs = [(step, json.loads(metrics)) for step, metrics in found]
    return [(step, metrics[name]) for step, metrics in pairs if name in metrics]


def test_run_is_read_back_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    options = {"report_to": "trackio", "trackio_space_id": None, "project": "digits"}
    train(tmp_path, env=env, save_strategy="epoch", **options)
    path = tmp_path / "trackio" / "digits.db"
    assert rows(path, "train/loss") == logged(tmp_path, "loss")
    assert rows(path, "eval/loss") == logged(tmp_path, "eval_loss")
    assert len(rows(path, "test/loss")) == 1
    with closing(sqlite3.connect(path)) as database:
        ((name, config),) = database.execute("SELECT run_name, config FROM configs").fetchall()
    assert (name, json.loads(config)["learning_rate"]) == ("my run", 0.01)
    train(tmp_path, env=env, num_train_epochs=2, resume="out/checkpoint-2", **options)
    assert rows(path, "train/loss") == logged(tmp_path, "loss")


def test_space_is_where_it_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio

    from hftrain.loggers.base import RunFacts
    from hftrain.loggers.trackio import TrackioLogger

    asked = {}
    # A stand-in: the real one would create a Space on the Hub.
    monkeypatch.setattr(trackio, "init", lambda **options: asked.update(options) or type("Run", (), {"name": "n"})())
    TrackioLogger().start(RunFacts(name="n", project="p", space_id="me/space", is_private=True))
    assert (asked["space_id"], asked["project"], asked["private"]) == ("me/space", "p", True)
