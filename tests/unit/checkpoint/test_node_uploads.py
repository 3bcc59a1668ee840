"""Files of several machines, brought together through the store; real processes are in tests/distributed."""

from __future__ import annotations

import pytest
from support.remote import URL, listing, write

from hftrain import CheckpointError
from hftrain.extras.remote.checkpoints import NodeUploads
from hftrain.storage import files

pytestmark = pytest.mark.usefixtures("store")


def stage(folder, **content: str):
    staged = files.begin(folder / "checkpoint-5")
    for name, text in content.items():
        (staged / name).write_text(text)
    return staged


def test_files_of_other_machines_are_collected(tmp_path):
    for rank in (1, 2):
        sent = stage(tmp_path / f"machine{rank}", **{f"rng_state_{rank}.pth": str(rank)})
        NodeUploads(URL, rank=rank, is_sender=True).send(sent, step=5)
        assert not sent.exists()
    staged = stage(tmp_path / "main", a="0")
    NodeUploads(URL, rank=0, is_sender=False).collect(staged)
    assert {path.name: path.read_text() for path in staged.iterdir()} == {
        "a": "0", "rng_state_1.pth": "1", "rng_state_2.pth": "2",
    }  # fmt: skip
    assert listing() == []


def test_what_a_killed_save_left_is_cleared(tmp_path):
    write("checkpoint-5/manifest.json", b"")
    NodeUploads(URL, rank=1, is_sender=True).send(stage(tmp_path, a="1"), step=5)
    NodeUploads(URL, rank=0, is_sender=False).clear()
    assert listing() == ["checkpoint-5/manifest.json"]


def test_a_damaged_parcel_is_not_collected(tmp_path):
    NodeUploads(URL, rank=1, is_sender=True).send(stage(tmp_path / "machine1", a="1"), step=5)
    write(".parcel-1/a", b"2")
    with pytest.raises(CheckpointError, match=r"a"):
        NodeUploads(URL, rank=0, is_sender=False).collect(stage(tmp_path / "main"))
