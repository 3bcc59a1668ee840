"""Checkpoints in a remote folder, on fsspec's store in memory: the commit, what it survives, and the way back."""

from __future__ import annotations

import shutil

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.remote import URL, failing, listing, read, write

from hftrain import CheckpointError
from hftrain.checkpoint.manifest import MANIFEST, verify
from hftrain.checkpoint.rotation import UnreachableError
from hftrain.extras.remote.checkpoints import RemoteCheckpoints

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def make(make_manager):
    """Return a function that makes a manager of the remote folder; all of them belong to one run."""

    def make_remote(**config):
        manager = make_manager(url=URL, **config)
        manager.run_id = "run"
        return manager

    return make_remote


def checkpoints() -> list[str]:
    return [name.partition("/")[0] for name in listing() if name.endswith(f"/{MANIFEST}")]


def test_the_manifest_comes_last(make, save_at, monkeypatch):
    whole, seen = MemoryFileSystem.put_file, []

    def watch(self, source, target, **options):
        seen.append(target.rpartition("/")[2])
        return whole(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", watch)
    path = save_at(make(), 5)
    assert seen[0] == ".incomplete-run"
    assert seen[-1] == MANIFEST
    assert sorted(seen[1:]) == sorted(file.name for file in path.iterdir())


def test_latest_downloads_nothing_that_is_there(make, save_at, monkeypatch):
    path = save_at(make(), 5)
    whole, seen = MemoryFileSystem.get_file, []
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *a, **k: seen.append(a[1]) or whole(*a, **k))
    assert make().latest() == path
    assert {name.rpartition("/")[2] for name in seen} == {MANIFEST}


def test_latest_replaces_a_copy_that_is_another(make, save_at, output_dir):
    path = save_at(make(), 5)
    (path / "model.safetensors").write_bytes(b"damaged")
    assert make().latest() == path
    assert verify(path).step == 5
    assert [path.name for path in output_dir.iterdir()] == ["checkpoint-5"]


def test_a_save_downloads_no_manifest_but_that_of_what_it_deletes(make, save_at, monkeypatch):
    for step in range(10, 20):
        save_at(make(), step)
    whole, seen = MemoryFileSystem.get_file, []
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *a, **k: seen.append(a[1]) or whole(*a, **k))
    manager = make(save_total_limit=3)
    manager.claim()
    assert len(seen) == 10
    for step, num_deleted in ((20, 8), (21, 1), (22, 1), (20, 0)):
        seen.clear()
        save_at(manager, step)
        manager.rotate()
        assert len(seen) == num_deleted
    assert sorted(checkpoints()) == ["checkpoint-20", "checkpoint-21", "checkpoint-22"]


@pytest.mark.parametrize("damage", ["cut", "flip", "delete", "no manifest", "manifest", "renamed"])
def test_latest_passes_over_what_is_damaged(make, save_at, output_dir, caplog, damage):
    for step in (5, 10):
        save_at(make(), step)
    shutil.rmtree(output_dir)
    name = "checkpoint-10/optimizer.pt"
    content = read(name)
    if damage == "cut":
        write(name, content[:-1])
    elif damage == "flip":
        write(name, content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "delete":
        MemoryFileSystem().rm(f"/bucket/run/{name}")
    elif damage == "no manifest":
        MemoryFileSystem().rm(f"/bucket/run/checkpoint-10/{MANIFEST}")
    elif damage == "manifest":
        write(f"checkpoint-10/{MANIFEST}", read(f"checkpoint-10/{MANIFEST}")[:-9])
    else:
        MemoryFileSystem().mv("/bucket/run/checkpoint-10", "/bucket/run/checkpoint-11", recursive=True)
    assert make().latest() == output_dir / "checkpoint-5"
    assert "Skipped checkpoint-1" in caplog.text
    assert [path.name for path in output_dir.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("method", ["ls", "get_file"])
def test_a_store_that_fails_is_no_reason_to_take_an_older_one(make, save_at, output_dir, monkeypatch, method):
    save_at(make(), 5)
    shutil.rmtree(output_dir)
    failing(monkeypatch, method, times=99, error=OSError("unreachable"))
    with pytest.raises(UnreachableError, match=r"Cannot read .*memory://bucket/run.*unreachable.*Check the network"):
        make().latest()


def test_a_path_that_leaves_the_folder_is_refused(make, save_at, output_dir, tmp_path):
    save_at(make(), 5)
    shutil.rmtree(output_dir)
    # What a bucket may well hold, and a careless download would write beside the mirror.
    write("checkpoint-5/trainer_state.json", b"{}")
    MemoryFileSystem().rm(f"/bucket/run/checkpoint-5/{MANIFEST}")
    MemoryFileSystem.store["/bucket/run/checkpoint-5/../../evil"] = MemoryFileSystem.store[
        "/bucket/run/checkpoint-5/trainer_state.json"
    ]
    with pytest.raises(CheckpointError, match="not a path inside the folder"):
        RemoteCheckpoints(URL, mirror=output_dir).fetch("checkpoint-5")
    assert not list(tmp_path.rglob("evil"))


def test_a_manifest_of_unreasonable_size_is_not_downloaded(make, save_at, output_dir, monkeypatch):
    save_at(make(), 5)
    shutil.rmtree(output_dir)
    monkeypatch.setattr("hftrain.extras.remote.checkpoints._MAX_MANIFEST_BYTES", 10)
    with pytest.raises(CheckpointError, match=f"Its {MANIFEST} has"):
        RemoteCheckpoints(URL, mirror=output_dir).fetch("checkpoint-5")


# -- uploads that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.safetensors", "rng_state.pth", MANIFEST])
def test_a_failed_upload_names_the_copy_that_is_left(make, save_at, output_dir, monkeypatch, file):
    save_at(make(), 5)
    with monkeypatch.context() as patch:
        failing(patch, "put_file", times=99, error=OSError("gone"), only=lambda path: path.endswith(f"10/{file}"))
        with pytest.raises(CheckpointError, match=rf"Cannot upload checkpoint-10 .*gone.*whole in {output_dir}"):
            save_at(make(), 10)
    assert checkpoints() == ["checkpoint-5"]
    assert verify(output_dir / "checkpoint-10").step == 10
    save_at(make(), 10)
    assert checkpoints() == ["checkpoint-10", "checkpoint-5"]
    assert not any(".incomplete" in name for name in listing())


@pytest.mark.parametrize("step", [10, 3])
def test_what_was_never_uploaded_is_named_and_not_taken(make, save_at, output_dir, monkeypatch, caplog, step):
    save_at(make(), 5)
    with monkeypatch.context() as patch:
        failing(patch, "put_file", times=99, error=OSError("gone"))
        with pytest.raises(CheckpointError, match="gone"):
            save_at(make(), step)
    assert make().latest() == output_dir / "checkpoint-5"
    assert f"{output_dir / f'checkpoint-{step}'} is newer than what {URL} holds, and was never uploaded" in caplog.text


def test_a_store_that_keeps_less_than_it_was_given_gets_no_manifest(make, save_at, monkeypatch):
    whole = MemoryFileSystem.put_file

    def lose_a_byte(self, source, target, **options):
        whole(self, source, target, **options)
        if target.endswith("optimizer.pt"):
            self.pipe_file(target, self.cat_file(target)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", lose_a_byte)
    with pytest.raises(CheckpointError, match=r"optimizer.pt has \d+ bytes there instead of \d+"):
        save_at(make(), 5)
    assert checkpoints() == []


def test_the_old_manifest_goes_before_a_file_is_replaced(make, save_at, output_dir, monkeypatch):
    save_at(make(), 5)
    write("checkpoint-5/optimizer_shard-00001-of-00002.safetensors", b"of the old one")
    with monkeypatch.context() as patch:
        failing(patch, "put_file", times=99, error=OSError("gone"), only=lambda path: "optimizer.pt" in path)
        with pytest.raises(CheckpointError, match="gone"):
            save_at(make(), 5)
    assert checkpoints() == []
    path = save_at(make(), 5)
    assert listing() == sorted(f"checkpoint-5/{file.name}" for file in path.iterdir())


def test_what_a_killed_upload_left_is_swept_if_it_is_the_runs_own(make, save_at):
    for name, run in (("checkpoint-3", "run"), ("checkpoint-4", "other"), ("mine", "run")):
        write(f"{name}/.incomplete-{run}", b"")
        write(f"{name}/model.safetensors", b"half")
    write("checkpoint-2/model.safetensors", b"of nobody we know")
    save_at(make(), 5)
    left = {name.partition("/")[0] for name in listing()}
    assert left == {"checkpoint-2", "checkpoint-4", "checkpoint-5", "mine"}


def test_a_claim_beside_a_manifest_is_a_checkpoint(make, save_at, output_dir):
    save_at(make(), 3)
    write("checkpoint-3/.incomplete-run", b"")  # killed after the manifest, before the claim was taken back
    save_at(make(), 5)
    assert checkpoints() == ["checkpoint-3", "checkpoint-5"]


# -- rotation -----------------------------------------------------------------------------------------------------


def test_rotation_deletes_there_and_keeps_one_copy_here(make, save_at, output_dir):
    manager = make(save_total_limit=2)
    for step in (5, 10, 15):
        save_at(manager, step)
        manager.rotate()
    assert {name.partition("/")[0] for name in listing()} == {"checkpoint-10", "checkpoint-15"}
    assert [path.name for path in output_dir.iterdir()] == ["checkpoint-15"]


def test_rotation_with_an_empty_mirror_knows_what_is_there(make, save_at, output_dir):
    for step in (5, 10):
        save_at(make(), step)
    shutil.rmtree(output_dir)
    manager = make(save_total_limit=2)
    save_at(manager, 15)
    manager.rotate()
    assert checkpoints() == ["checkpoint-10", "checkpoint-15"]


def test_rotation_keeps_the_best_other_runs_and_what_it_does_not_know(make, make_manager, save_at, output_dir):
    save_at(make_manager(url=URL), 1)  # another run
    write("checkpoint-2/model.safetensors", b"of nobody we know")
    manager = make(save_total_limit=2)
    for step in (5, 10, 15):
        save_at(manager, step)
        manager.rotate(best=output_dir / "checkpoint-5")
    assert checkpoints() == ["checkpoint-1", "checkpoint-15", "checkpoint-5"]
    assert "checkpoint-2/model.safetensors" in listing()
    assert {"checkpoint-5", "checkpoint-15"} <= {path.name for path in output_dir.iterdir()}
    manager.keep_only(output_dir / "checkpoint-5")
    assert checkpoints() == ["checkpoint-1", "checkpoint-5"]


def test_rotation_spares_what_another_run_has_put_in_a_checkpoints_place(make, make_manager, save_at):
    manager = make(save_total_limit=1)
    save_at(manager, 5)
    save_at(make_manager(url=URL), 5)
    save_at(manager, 10)
    manager.rotate()
    assert checkpoints() == ["checkpoint-10", "checkpoint-5"]


def test_the_last_finite_one_stays_beside_the_one_to_keep_though_no_copy_is_here(make, output_dir):
    for step in (5, 10):
        make().save(step, [], facts={"is_finite": step == 5})
    shutil.rmtree(output_dir / "checkpoint-5")
    make().keep_only(output_dir / "checkpoint-10")
    assert checkpoints() == ["checkpoint-10", "checkpoint-5"]


def test_a_deletion_begins_with_the_manifest(make, save_at, monkeypatch):
    manager = make(save_total_limit=1)
    for step in (5, 10):
        save_at(manager, step)
    whole, seen = MemoryFileSystem._rm, []
    monkeypatch.setattr(MemoryFileSystem, "_rm", lambda *a, **k: seen.append(a[1]) or whole(*a, **k))
    manager.rotate()
    assert seen[0] == f"/bucket/run/checkpoint-5/{MANIFEST}"


@pytest.mark.parametrize("method", ["rm_file", "rm", "ls"])
def test_a_deletion_that_fails_ends_nothing(make, save_at, monkeypatch, caplog, method):
    manager = make(save_total_limit=1)
    for step in (5, 10):
        save_at(manager, step)
    failing(monkeypatch, method, times=99, error=PermissionError("may not"))
    manager.rotate()
    assert "Could not delete" in caplog.text or "Deleted no old checkpoints" in caplog.text
    assert checkpoints() == (["checkpoint-10"] if method == "rm" else ["checkpoint-10", "checkpoint-5"])
