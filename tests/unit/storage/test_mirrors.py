"""Mirrors of remote folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.remote import URL, failing, listing, read

from hftrain.storage.mirrors import Mirror, local_folder, mirror_of

pytestmark = pytest.mark.usefixtures("store")


def make_mirror() -> Mirror:
    return Mirror(URL, is_left_out=lambda part: part == "skipped")


def test_a_mirror_has_the_name_of_its_folder_and_one_place(tmp_path, monkeypatch):
    assert mirror_of(URL) == mirror_of(URL + "/") != mirror_of("memory://other/run")
    assert mirror_of(URL).name == "run"
    assert mirror_of(URL).is_relative_to(tmp_path / "cache" / "mirrors")
    monkeypatch.delenv("HFTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert mirror_of(URL).is_relative_to(tmp_path / "xdg" / "hftrain" / "mirrors")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert mirror_of(URL).is_relative_to(tmp_path / "home" / ".cache" / "hftrain" / "mirrors")


def test_local_folders_stay_where_they_are(tmp_path):
    assert local_folder("a", start=tmp_path) == tmp_path / "a"
    assert local_folder("/a/b", start=tmp_path) == Path("/a/b")
    assert local_folder("file:///a/b", start=tmp_path) == Path("/a/b")
    assert local_folder(URL, start=tmp_path) == mirror_of(URL)


def test_publish_uploads_what_is_new_or_changed():
    mirror_of(URL).mkdir(parents=True)
    (mirror_of(URL) / "old").write_text("of an earlier process")
    mirror = make_mirror()
    mirror.publish()
    assert listing() == []
    for name in ("a", "deep/b", ".hidden", "deep/.hidden/c", "skipped/d"):
        (mirror.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (mirror.folder / name).write_text("1")
    mirror.publish()
    assert listing() == ["a", "deep/b"]
    (mirror.folder / "a").write_text("22")
    (mirror.folder / "old").write_text("of this process")
    mirror.publish()
    assert listing() == ["a", "deep/b", "old"]
    assert read("a") == b"22"


def test_publish_uploads_nothing_twice(monkeypatch):
    mirror = make_mirror()
    mirror.folder.mkdir(parents=True)
    (mirror.folder / "a").write_text("1")
    mirror.publish()
    failing(monkeypatch, "put_file", times=99, error=PermissionError("no"))
    mirror.publish()


def test_what_could_not_be_published_is_taken_up_again(monkeypatch):
    mirror = make_mirror()
    mirror.folder.mkdir(parents=True)
    (mirror.folder / "a").write_text("1")
    failing(monkeypatch, "put_file", times=1, error=PermissionError("no"))
    with pytest.raises(PermissionError):
        mirror.publish()
    mirror.publish()
    assert listing() == ["a"]
