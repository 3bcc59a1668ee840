from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hftrain.extras.hub import files as hub_files
from hftrain.extras.hub.files import drop_abandoned, folder_files, model_files, output_files, take_snapshot
from hftrain.storage.files import discard


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    return folder


RESUME = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_1.pth", "optimizer_0/x.distcp")
MODEL = ("model.safetensors", "config.json", "1_Pooling/config.json", "task_state.safetensors", "training_args.bin")


def test_output_files_are_what_people_want(tmp_path: Path) -> None:
    kept = {*MODEL, "README.md", "all_results.json", "trainer_state.json"}
    hidden = (".git/config", ".staging-checkpoint-3-0123abcd/model.safetensors", ".cache/x", ".write-test-1")
    checkpoints = ("checkpoint-3/model.safetensors", "run-1/checkpoint-3/config.json", "last-checkpoint/config.json")
    fill(tmp_path, *kept, *hidden, *checkpoints, *RESUME)
    assert output_files(tmp_path).keys() == kept


def test_output_files_leave_sagemaker_marks_out(tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "config.json.sagemaker-uploading", "model.bin.sagemaker-uploaded")
    assert output_files(tmp_path).keys() == {"config.json"}


def test_model_files_leave_out_what_only_a_resume_needs(tmp_path: Path) -> None:
    folder = fill(tmp_path / "checkpoint-3", *MODEL, *RESUME, "manifest.json", "trainer_state.json")
    assert model_files(folder).keys() == set(MODEL)


def test_take_snapshot_outlives_rotation_and_costs_no_space(tmp_path: Path) -> None:
    checkpoint = fill(tmp_path / "checkpoint-3", *MODEL)
    before = (checkpoint / "model.safetensors").stat().st_ino
    snapshot = take_snapshot(folder_files(checkpoint), tmp_path).folder
    assert (snapshot / "model.safetensors").stat().st_ino == before
    discard(checkpoint)
    assert (snapshot / "1_Pooling/config.json").read_text() == "1_Pooling/config.json"
    assert output_files(tmp_path) == {}


def test_take_snapshot_copies_what_may_be_written_again(tmp_path: Path) -> None:
    fill(tmp_path, "README.md")
    snapshot = take_snapshot({"README.md": tmp_path / "README.md"}, tmp_path).folder
    (tmp_path / "README.md").write_text("new", encoding="utf-8")
    assert (snapshot / "README.md").read_text() == "README.md"


def test_take_snapshot_copies_where_links_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands in for a file system without hard links.
    monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError("no links here")))
    snapshot = take_snapshot(folder_files(fill(tmp_path / "checkpoint-3", *MODEL)), tmp_path).folder
    assert folder_files(snapshot).keys() == set(MODEL)


def test_take_snapshot_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        take_snapshot({"a": fill(tmp_path, "a") / "a", "b": tmp_path / "absent"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
def test_drop_abandoned_spares_what_is_in_use_whatever_the_clock_says(tmp_path: Path) -> None:
    lives, killed, new = (take_snapshot({"a": fill(tmp_path, "a") / "a"}, tmp_path) for _ in range(3))
    before_s = time.time() - hub_files.ABANDONED_S - 60  # by a clock that has jumped ahead since
    for snapshot in (lives, killed):
        os.utime(snapshot.folder, (before_s, before_s))
    for snapshot in (killed, new):
        snapshot.release()  # as the end of its process does
    drop_abandoned(tmp_path)
    assert [snapshot.folder.exists() for snapshot in (lives, killed, new)] == [True, False, True]
    lives.release()
    drop_abandoned(tmp_path)
    assert not lives.folder.exists()
