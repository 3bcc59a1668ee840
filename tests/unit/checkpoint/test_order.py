"""The order of checkpoints, whatever the clock says, and what it costs to know it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hftrain.checkpoint import rotation
from hftrain.checkpoint.manifest import _checksum, checkpoint_step
from hftrain.checkpoint.rotation import by_commit

CLOCKS = {
    "back": [900.0, 500.0, 100.0, 50.0],
    "forward and back": [100.0, 9e9, 101.0, 102.0],
    "standing still": [100.0, 100.0, 100.0, 100.0],
}


@pytest.fixture(params=CLOCKS.values(), ids=CLOCKS)
def clock(request, monkeypatch):
    """Let every look at the wall clock be one of four; returns them."""
    times = iter(request.param)
    monkeypatch.setattr("hftrain.checkpoint.manager.time.time", lambda: next(times))
    return request.param


def save(manager, *steps: int, metrics: tuple[float, ...] = ()) -> None:
    for step, metric in zip(steps, metrics or steps, strict=True):
        manager.save(step, [lambda folder: (folder / "note").write_text("note")], facts={"metric": metric})
        manager.rotate()


def steps_in(folder: Path) -> list[int]:
    return sorted(checkpoint_step(path) for path in folder.iterdir())


def age(folder: Path) -> None:
    """Make a checkpoint one of a version that wrote no number."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["facts"]["commit_number"], body["checksum"]
    (folder / "manifest.json").write_text(json.dumps({**body, "checksum": _checksum(body)}))


@pytest.mark.usefixtures("clock")
def test_a_run_begun_again_in_the_folder_leaves_higher_steps_behind(make_manager, output_dir):
    save(make_manager(), 80, 90)
    save(make_manager(save_total_limit=1), 5, 10)
    assert steps_in(output_dir) == [10, 80, 90]
    assert by_commit(output_dir)[-1] == make_manager().latest() == output_dir / "checkpoint-10"


def test_checkpoints_without_numbers_come_first_and_among_themselves_by_time(make_manager, output_dir, monkeypatch):
    times = iter([300.0, 200.0, 100.0])
    monkeypatch.setattr("hftrain.checkpoint.manager.time.time", lambda: next(times))
    save(make_manager(), 7, 8)
    for step in (7, 8):
        age(output_dir / f"checkpoint-{step}")
    assert make_manager().latest() == output_dir / "checkpoint-7"
    save(make_manager(), 5)
    assert [checkpoint_step(path) for path in by_commit(output_dir)] == [8, 7, 5]
    assert make_manager().latest() == output_dir / "checkpoint-5"


def test_a_run_that_goes_on_from_another_folder_comes_after_what_is_moved_there_later(make_manager, output_dir):
    save(make_manager(), 1, 2, 3)
    newest = make_manager().open(output_dir / "checkpoint-3")
    aside = output_dir.rename(output_dir.with_name("aside"))
    manager = make_manager()
    manager.follow(newest)
    save(manager, 2)
    (aside / "checkpoint-3").rename(output_dir / "checkpoint-3")
    assert make_manager().latest() == output_dir / "checkpoint-2"


def test_what_a_killed_commit_set_aside_counts(make_manager, output_dir):
    save(make_manager(), 1, 2)
    (output_dir / "checkpoint-2").rename(output_dir / ".replaced-0123abcd-checkpoint-2")
    manager = make_manager()
    manager.claim()
    save(manager, 1)
    manager.lock.release()
    assert [checkpoint_step(path) for path in by_commit(output_dir)] == [2, 1]


@pytest.mark.parametrize("limit", [None, 3, 30])
def test_a_save_reads_no_manifest_but_that_of_what_it_deletes(make_manager, output_dir, monkeypatch, limit):
    save(make_manager(), *range(100, 140))
    reads: list[str] = []
    whole = rotation.readable
    monkeypatch.setattr(rotation, "readable", lambda path: reads.append(path.name) or whole(path))
    manager = make_manager(save_total_limit=limit, keep_best=None if limit is None else 1)
    manager.claim()
    assert len(reads) == 40
    reads.clear()
    save(manager, *range(1, 41))
    manager.lock.release()
    gone = {f"checkpoint-{step}" for step in range(1, 41)} - {path.name for path in output_dir.iterdir()}
    assert len(reads) == len(gone)
    assert {*reads} == gone
    assert len(steps_in(output_dir)) == 40 + (40 if limit is None else limit)


def test_rotation_spares_what_another_program_has_put_in_a_checkpoints_place(make_manager, output_dir, tmp_path):
    manager = make_manager(save_total_limit=2)
    save(manager, 1, 2)
    other = make_manager()
    save(other, 1)
    save(manager, 3)
    assert steps_in(output_dir) == [1, 2, 3]
