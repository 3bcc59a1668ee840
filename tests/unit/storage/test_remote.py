"""Remote folders, on fsspec's store in memory; S3 itself is in tests/guarantees/test_g1_remote.py."""

from __future__ import annotations

import importlib
import random
import sys

import pytest
from support.remote import URL, failing, listing, read, write

from hftrain import ConfigError, MissingDependencyError
from hftrain.extras.remote.folders import Mirror, RemoteFolder
from hftrain.storage.files import check_url, mirror_of

pytestmark = pytest.mark.usefixtures("store")


def hide(monkeypatch, package: str) -> None:
    """Make a package impossible to import, also by what has been imported."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "_registry", {})


def test_check_hands_on_what_a_store_of_fsspec_needs(monkeypatch):
    hide(monkeypatch, "paramiko")
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(MissingDependencyError, match=r"paramiko.*Install what the message names"):
        check_url("sftp://host/run")


def test_check_writable_names_the_stores_reason(monkeypatch):
    failing(monkeypatch, "put_file", times=99, error=PermissionError("Access Denied"))
    with pytest.raises(ConfigError, match=r"memory://bucket/run.*PermissionError: Access Denied.*credentials"):
        RemoteFolder(URL).check_writable()


@pytest.mark.parametrize("error", [OSError("500"), RuntimeError("Internal Server Error"), TimeoutError()])
def test_what_fails_is_tried_again(monkeypatch, error, caplog):
    failures = failing(monkeypatch, "put_file", times=4, error=error)
    RemoteFolder(URL).write("a", "text")
    assert read("a") == b"text"
    assert len(failures) == 4
    assert caplog.text.count("is tried again") == 4


def test_what_fails_for_good_is_an_os_error(monkeypatch):
    failures = failing(monkeypatch, "put_file", times=99, error=RuntimeError("Internal Server Error"))
    with pytest.raises(OSError, match="put_file a: RuntimeError: Internal Server Error"):
        RemoteFolder(URL).write("a", "text")
    assert len(failures) == 5


@pytest.mark.parametrize("error", [PermissionError("no"), FileNotFoundError("bucket"), ValueError("name")])
def test_what_cannot_get_better_is_not_tried_again(monkeypatch, error):
    failures = failing(monkeypatch, "put_file", times=99, error=error)
    with pytest.raises(OSError, match=str(error)):
        RemoteFolder(URL).write("a", "text")
    assert len(failures) == 1


def test_the_stores_draws_leave_the_random_numbers_alone(monkeypatch):
    failing(monkeypatch, "put_file", times=2, error=OSError("500"), only=lambda path: random.random() >= 0)
    before = random.getstate()
    RemoteFolder(URL).write("a", "text")
    assert random.getstate() == before


def test_a_store_that_remembers_listings_is_asked_anew(tmp_path):
    folder = RemoteFolder(URL)
    assert folder.names() == []
    write("a", b"")
    assert folder.names() == ["a"]


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
