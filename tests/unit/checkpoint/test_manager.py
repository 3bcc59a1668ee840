"""Save, find, open and rotate."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from hftrain.checkpoint import manifest
from hftrain.checkpoint.manifest import verify
from hftrain.checkpoint.state_files import load_process_state
from hftrain.core.errors import CheckpointError
from hftrain.storage import files
from hftrain.storage.tensors import save_containers


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_note(folder: Path) -> None:
    (folder / "note").write_text("note")


def save_notes(manager, *steps: int) -> None:
    for step in steps:
        manager.save(step, [write_note], facts={})


def test_own_files_are_not_read_again_for_their_hash_unless_somebody_changed_them(make_manager, monkeypatch):
    """Whatever a hook of the user's does to a file afterwards, with the same size and at once."""
    read: list[str] = []
    monkeypatch.setattr(manifest, "sha256", lambda path: read.append(path.name) or files.sha256(path))

    def write(folder: Path) -> None:
        for name in ("kept.pt", "changed.pt", "replaced.pt"):
            save_containers({"a": 1}, folder / name)

    def hook(folder: Path) -> None:
        data = (folder / "changed.pt").read_bytes()
        (folder / "changed.pt").write_bytes(data[::-1])
        shutil.copy2(folder / "kept.pt", folder / "copy")
        (folder / "copy").replace(folder / "replaced.pt")
        write_note(folder)

    path = make_manager().save(5, [write, hook], facts={})
    assert sorted(read) == ["changed.pt", "note", "replaced.pt"]
    monkeypatch.undo()
    verify(path)


@pytest.mark.parametrize("function", ["write_text", "fsync_tree", "begin", "commit"])
def test_a_failing_commit_leaves_the_previous_checkpoint_and_nothing_else(
    make_manager, save_at, output_dir, monkeypatch, function
):
    manager = make_manager()
    previous = save_at(manager, 5)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    module = "hftrain.checkpoint.manifest" if function == "write_text" else "hftrain.storage.files"
    monkeypatch.setattr(f"{module}.{function}", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        manager.save(10, [write_note], facts={})
    assert listing(output_dir) == ["checkpoint-5"]
    assert manager.latest() == previous


def test_open_warns_of_a_hugging_face_checkpoint(make_manager, save_at, caplog):
    manager = make_manager()
    path = save_at(manager, 5)
    (path / "manifest.json").unlink()
    assert manager.open(path) is None
    assert "without proof" in caplog.text
    assert load_process_state(path, rank=0, world_size=1)


def test_rotate_never_touches_a_folder_it_does_not_know(make_manager, output_dir, tmp_path):
    manager = make_manager(save_total_limit=1)
    save_notes(manager, 1, 2, 3)
    (output_dir / "checkpoint-1" / "manifest.json").write_text("{}")
    (output_dir / "checkpoint-2").rename(tmp_path / "checkpoint-2")
    (output_dir / "checkpoint-2").symlink_to(tmp_path / "checkpoint-2")
    (output_dir / "checkpoint-0").mkdir()
    (output_dir / "best").mkdir()
    shutil.copytree(output_dir / "checkpoint-3", output_dir / "checkpoint-30")
    save_notes(manager, 4)
    manager.rotate()
    kept = ["best", "checkpoint-0", "checkpoint-1", "checkpoint-2", "checkpoint-30", "checkpoint-4"]
    assert listing(output_dir) == kept


def test_rotate_touches_no_other_run_and_latest_goes_by_commit(make_manager, output_dir):
    save_notes(make_manager(), 90, 100)
    manager = make_manager(save_total_limit=1)
    save_notes(manager, 5)
    manager.rotate()
    assert listing(output_dir) == ["checkpoint-100", "checkpoint-5", "checkpoint-90"]
    assert manager.latest() == output_dir / "checkpoint-5"


def test_keep_only_leaves_one_and_what_it_does_not_know(make_manager, output_dir):
    manager = make_manager(save_total_limit=1)
    save_notes(manager, 1, 2, 3)
    (output_dir / "checkpoint-9").mkdir()
    manager.keep_only(output_dir / "checkpoint-2")
    assert listing(output_dir) == ["checkpoint-2", "checkpoint-9"]


@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-7"])
def test_keep_only_deletes_nothing_for_the_sake_of_a_damaged_one(make_manager, output_dir, caplog, name):
    manager = make_manager()
    save_notes(manager, 1, 2, 3)
    (output_dir / "checkpoint-2" / "note").write_text("other")
    manager.keep_only(output_dir / name)
    assert listing(output_dir) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert "Kept all checkpoints" in caplog.text


def test_a_kill_before_any_file_operation_loses_nothing_committed(make_manager, output_dir, monkeypatch):
    """Saving step 5 again, limit 1, dies before its n-th change of the disk, for every n."""

    class Killed(BaseException):
        pass

    def dying(real, calls: list[int], at: int):
        def call(*args: object, **kwargs: object) -> object:
            calls.append(0)
            if len(calls) == at:
                raise Killed
            return real(*args, **kwargs)

        return call

    def content() -> str:
        return (make_manager().latest() / "note").read_text()

    for at in range(1, 100):
        shutil.rmtree(output_dir, ignore_errors=True)
        save_notes(make_manager(), 5)
        manager, calls = make_manager(save_total_limit=1), []
        with monkeypatch.context() as patch:
            for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (shutil, "rmtree")):
                patch.setattr(module, name, dying(getattr(module, name), calls, at))
            try:
                manager.save(5, [lambda folder: (folder / "note").write_text("again")], facts={})
                manager.rotate()
            except Killed:
                assert content() in ("note", "again")
                continue
        break
    assert at > 10
    assert content() == "again"
    files.sweep(output_dir, is_ours=lambda _: True)
    assert listing(output_dir) == ["checkpoint-5"]
    assert json.loads((output_dir / "checkpoint-5" / "manifest.json").read_text())["step"] == 5
