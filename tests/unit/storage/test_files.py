"""Durable files and the commit of a folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.storage import files


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_check_writable_creates_the_folder_and_leaves_it_empty(tmp_path):
    files.check_writable(tmp_path / "a" / "b")
    assert listing(tmp_path / "a" / "b") == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system where nobody may write")
def test_check_writable_refuses_where_no_file_can_be_created():
    with pytest.raises(ConfigError, match="Cannot write to '/proc'"):
        files.check_writable(Path("/proc"))


def test_check_writable_names_a_full_disk(tmp_path, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_text", full)
    with pytest.raises(ConfigError, match="No space left"):
        files.check_writable(tmp_path)


def test_write_text_keeps_the_old_text_when_the_rename_fails(tmp_path, monkeypatch):
    files.write_text(tmp_path / "a.json", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        files.write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert listing(tmp_path) == ["a.json"]


def test_read_json_refuses_a_giant_without_reading_it(tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate((1 << 28) + 1)  # sparse
    with pytest.raises(CheckpointError, match="larger"):
        files.read_json(tmp_path / "a.json")


def staged_with(target: Path, text: str) -> Path:
    staged = files.begin(target)
    (staged / "sub").mkdir()
    (staged / "sub" / "file").write_text(text)
    return staged


def test_commit_flushes_every_file_and_folder_before_the_rename(tmp_path, monkeypatch):
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name if Path("/proc").is_dir() else "?")
        real_fsync(descriptor)

    def rename(old: Path, new: Path) -> None:
        events.append("rename")
        real_rename(old, new)

    staged = staged_with(tmp_path / "target", "text")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    files.commit(staged, tmp_path / "target")
    assert events == ["file", "sub", staged.name, "rename", tmp_path.name]


def test_sweep_touches_only_leftovers_of_the_caller(tmp_path):
    kept = [".staging-0123abcd-other", ".staging-target", ".trash-0123abcg-target", "target", ".cache"]
    gone = [".staging-0123abcd-target", ".trash-0123abcd-target", ".replaced-0123abcd-target"]
    gone += [".staging-target-0123abcd", ".trash-target-0123abcd", ".replaced-target-0123abcd"]  # as before
    for name in kept + gone:
        (tmp_path / name).mkdir()
    (tmp_path / ".trash-target-00000000").symlink_to(tmp_path / ".cache")
    files.sweep(tmp_path, is_ours=lambda name: name == "target")
    assert listing(tmp_path) == sorted([*kept, ".trash-target-00000000"])


@pytest.mark.parametrize("count", [0, 2])
def test_find_staging_wants_exactly_one(tmp_path, count):
    for _ in range(count):
        files.begin(tmp_path / "target")
    with pytest.raises(CheckpointError, match=f"sees {count} staging"):
        files.find_staging(tmp_path / "target")


@pytest.mark.parametrize(("code", "is_fatal"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_fsync_of_a_folder_may_be_unsupported_but_not_fail(tmp_path, monkeypatch, code, is_fatal):
    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    if is_fatal:
        with pytest.raises(OSError, match=os.strerror(code)):
            files.fsync_tree(tmp_path)
    else:
        files.fsync_tree(tmp_path)


def test_sweep_removes_what_a_killed_write_test_left(tmp_path):
    for name in (".write-test-12ab34cd", "..write-test-12ab34cd.9f8e7d6c.part"):
        (tmp_path / name).write_text("test")
    files.sweep(tmp_path, is_ours=lambda name: True)
    assert list(tmp_path.iterdir()) == []
