"""The manifest proves that a checkpoint is the one that was saved."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hftrain.checkpoint.manifest import read_manifest, verify, write_manifest
from hftrain.core.errors import CheckpointError
from hftrain.core.state import Progress

FACTS = {
    "progress": Progress(step=5, samples=40).state_dict(),
    "geometry": {"world_size": 1, "batch_size": 8, "accumulation": 1},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-5"
    (folder / "sub").mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"optimizer")
    (folder / "sub" / "file").write_bytes(b"file")
    write_manifest(folder, FACTS, step=5)
    return folder


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a manifest with a checksum that is right again, as an attacker would."""
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("checksum")
    change(body)
    body["checksum"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body))


def test_manifest_refuses_to_record_a_link(checkpoint):
    (checkpoint / "link").symlink_to(checkpoint / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"Cannot save .*link"):
        write_manifest(checkpoint, {}, step=5)


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_seen(checkpoint):
    path = checkpoint / "manifest.json"
    data = path.read_bytes()
    for index in range(len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("optimizer.pt", r"optimizer\.pt.*is a link"),
        ("manifest.json", r"manifest\.json.*is a link"),
        ("sub", r"sub.file.*is a link, or lies in one"),
    ],
)
def test_verify_refuses_links_to_the_right_bytes(checkpoint, tmp_path, name, reason):
    (checkpoint / name).rename(tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=reason):
        verify(checkpoint)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "sub/../../secret", "", ".", "a//b", "C:/x", "a\\b", "./sub/file"]
)
def test_verify_refuses_paths_that_leave_the_folder(checkpoint, name):
    forge(checkpoint, lambda body: body["files"].update({name: {"size": 0, "sha256": ""}}))
    with pytest.raises(CheckpointError, match="not a path inside the folder"):
        verify(checkpoint)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["optimizer.pt", "manifest.json"])
def test_verify_does_not_wait_for_a_pipe(checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(CheckpointError, match=r"not a (regular )?file"):
        verify(checkpoint)


def test_verify_refuses_a_part_that_was_added_later_and_accepts_notes(checkpoint):
    (checkpoint / "README.md").write_text("mine")
    verify(checkpoint)
    (checkpoint / "scaler.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"scaler\.pt.*not there when"):
        verify(checkpoint)


def test_verify_refuses_a_checkpoint_under_the_name_of_another_step(checkpoint):
    shutil.copytree(checkpoint, checkpoint.with_name("best"))
    assert verify(checkpoint.with_name("best")).step == 5
    with pytest.raises(CheckpointError, match="saved at step 5"):
        verify(checkpoint.rename(checkpoint.with_name("checkpoint-6")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body.update(format_version=2), "Its format is 2"),
        (lambda body: body.update(more=1), "entries"),
        (lambda body: body.pop("facts"), "entries"),
        (lambda body: body["facts"].update(progress={"epoch": 10**30}), "entries"),
        (lambda body: body.update(step="5"), "entries"),
        (lambda body: body.update(files=[]), "entries"),
        (lambda body: body["files"].update(a={"size": 1}), "entries"),
    ],
)
def test_read_manifest_refuses_other_formats(checkpoint, change, reason):
    forge(checkpoint, change)
    with pytest.raises(CheckpointError, match=reason):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"micro_steps_in_epoch": 10**12}, "micro_steps_in_epoch is 1000000000000 at step 5"),
        ({"offset_in_epoch": 10**12}, "offset_in_epoch is 1000000000000 at step 5"),
        ({"epoch": 10**9}, "epoch is 1000000000 at step 5"),
        ({"step": 6}, "its own step is 6 at step 5"),
    ],
)
def test_read_manifest_refuses_a_position_that_no_run_reaches(checkpoint, change, reason):
    facts = {**FACTS, "plan": {"max_steps": 9}}
    write_manifest(checkpoint, facts, step=5)
    assert read_manifest(checkpoint).facts == facts
    forge(checkpoint, lambda body: body["facts"]["progress"].update(change))
    with pytest.raises(CheckpointError, match=f"position in the data is impossible: {reason}"):
        read_manifest(checkpoint)
