"""Pieces of split tensors: written by several processes, read whole by any number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hftrain.core.errors import CheckpointError
from hftrain.core.types import Shard
from hftrain.storage.shards import find_shards, load_shards, save_shards

WHOLE = torch.arange(10.0).reshape(5, 2)


def save(folder: Path) -> None:
    shared = WHOLE[:3]
    first = {"a": Shard(shared, 0, 5), "tied": Shard(shared, 0, 5), "plain": Shard(torch.tensor(7))}
    save_shards(first, folder, stem="part", rank=0, world_size=3)
    save_shards(
        {"a": Shard(WHOLE[3:], 3, 5), "tied": Shard(WHOLE[3:], 3, 5)}, folder, stem="part", rank=1, world_size=3
    )
    save_shards({}, folder, stem="part", rank=2, world_size=3)


def test_pieces_are_put_together(tmp_path: Path) -> None:
    save(tmp_path)
    names = [f"part-0000{rank}-of-00003.safetensors" for rank in (0, 1)]
    assert [path.name for path in find_shards(tmp_path, stem="part")] == names
    found = load_shards(tmp_path, stem="part")
    assert found.keys() == {"a", "tied", "plain"}
    assert torch.equal(found["a"], WHOLE)
    assert torch.equal(found["tied"], WHOLE)
    assert found["plain"] == 7


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert load_shards(tmp_path, stem="part") == {}
    assert find_shards(tmp_path / "absent", stem="part") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_piece_is_an_error_that_names_it(tmp_path: Path, rank: int) -> None:
    save(tmp_path)
    (tmp_path / f"part-0000{rank}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"Cannot read a from .*5 rows"):
        load_shards(tmp_path, stem="part")


def test_damaged_file_is_an_error(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "part-00001-of-00003.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="damaged"):
        load_shards(tmp_path, stem="part")
