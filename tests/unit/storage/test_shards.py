"""Pieces of split tensors: written by several processes, read whole by any number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hftrain.core.errors import CheckpointError
from hftrain.core.types import Shard
from hftrain.storage import shards
from hftrain.storage.shards import find_shards, load_shards, open_shards, open_tensors, read_whole, save_shards
from hftrain.storage.tensors import save_tensors

WHOLE = torch.arange(10.0).reshape(5, 2)
GRID = torch.arange(60.0).reshape(5, 4, 3)
BLOCKS = [((0, 3), (0, 3)), ((0, 3), (3, 4)), ((3, 5), (0, 3)), ((3, 5), (3, 4))]


def save(folder: Path) -> None:
    first, last = Shard(WHOLE[:3], (0, 0), (5, 2)), Shard(WHOLE[3:], (3, 0), (5, 2))
    save_shards({"a": first, "tied": first, "plain": Shard(torch.tensor(7))}, folder, stem="part", rank=0, world_size=3)
    save_shards({"a": last, "tied": last}, folder, stem="part", rank=1, world_size=3)
    save_shards({}, folder, stem="part", rank=2, world_size=3)


def save_grid(folder: Path, blocks: list[tuple[tuple[int, int], ...]]) -> None:
    for rank, ((top, bottom), (left, right)) in enumerate(blocks):
        shard = Shard(GRID[top:bottom, left:right], (top, left, 0), (5, 4, 3))
        save_shards({"grid": shard}, folder, stem="part", rank=rank, world_size=len(blocks))


def test_pieces_are_put_together(tmp_path: Path) -> None:
    save(tmp_path)
    names = [f"part-0000{rank}-of-00003.safetensors" for rank in (0, 1)]
    assert [path.name for path in find_shards(tmp_path, stem="part")] == names
    found = load_shards(tmp_path, stem="part")
    assert found.keys() == {"a", "tied", "plain"}
    assert torch.equal(found["a"], WHOLE)
    assert torch.equal(found["tied"], WHOLE)
    assert found["plain"] == 7


@pytest.mark.parametrize(("rank", "block"), [(0, "[0:3, 0:2]"), (1, "[3:5, 0:2]")])
def test_missing_piece_is_an_error_that_names_it(tmp_path: Path, rank: int, block: str) -> None:
    save(tmp_path)
    (tmp_path / f"part-0000{rank}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_shards(tmp_path, stem="part")
    assert "Cannot read a, whose shape is [5, 2]," in str(caught.value)
    assert f"Its block {block} is missing." in str(caught.value)


def test_damaged_file_is_an_error(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "part-00001-of-00003.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="damaged"):
        load_shards(tmp_path, stem="part")


# -- blocks of several dimensions --------------------------------------------------------------------------------------


def test_blocks_are_put_together_in_any_order(tmp_path: Path) -> None:
    save_grid(tmp_path, BLOCKS[::-1])
    assert torch.equal(load_shards(tmp_path, stem="part")["grid"], GRID)


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        (BLOCKS[:3], "[3:5, 3:4, 0:3] is missing"),
        (BLOCKS[1:], "[0:3, 0:3, 0:3] is missing"),
        ([BLOCKS[0], BLOCKS[2]], "[0:3, 3:4, 0:3] is missing"),
        ([*BLOCKS, BLOCKS[1]], "[0:3, 3:4, 0:3] is there more than once"),
        ([*BLOCKS, ((2, 4), (0, 3))], "[2:3, 0:3, 0:3] is there more than once"),
        ([((0, 3), (0, 4)), ((2, 5), (0, 4))], "[2:3, 0:4, 0:3] is there more than once"),
    ],
)
def test_blocks_that_do_not_cover_the_tensor_once_are_an_error(
    tmp_path: Path, blocks: list[tuple[tuple[int, int], ...]], problem: str
) -> None:
    save_grid(tmp_path, blocks)
    with pytest.raises(CheckpointError) as caught:
        open_shards(tmp_path, stem="part")
    assert f"Its block {problem}." in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [Shard(WHOLE[3:], (3, 0), (6, 2)), Shard(WHOLE[3:], (3,), (5,)), Shard(WHOLE[3:], (4, 0), (5, 2))],
    ids=["shape", "dimensions", "outside"],
)
def test_blocks_of_different_tensors_are_an_error(tmp_path: Path, other: Shard) -> None:
    save_shards({"a": Shard(WHOLE[:3], (0, 0), (5, 2))}, tmp_path, stem="part", rank=0, world_size=2)
    save_shards({"a": other}, tmp_path, stem="part", rank=1, world_size=2)
    with pytest.raises(CheckpointError, match=r"Cannot read .*\bpart-00001|4:6, 0:2\] is outside of it"):
        load_shards(tmp_path, stem="part")


def test_blocks_of_two_dtypes_are_an_error(tmp_path: Path) -> None:
    for rank, block in enumerate((WHOLE[:3], WHOLE[3:].half())):
        save_shards({"a": Shard(block, (3 * rank, 0), (5, 2))}, tmp_path, stem="part", rank=rank, world_size=2)
    with pytest.raises(CheckpointError, match="another dtype"):
        load_shards(tmp_path, stem="part")


@pytest.mark.parametrize("place", [[[0], 5], [0, [5]], [-1, 5], [0.5, 5], [[0, "0"], [5, 2]], 5])
def test_place_that_is_none_is_an_error(tmp_path: Path, place: object) -> None:
    notes = {"hftrain.rows": json.dumps({"a": place})}
    save_tensors({"a": WHOLE}, tmp_path / "part-00000-of-00001.safetensors", metadata=notes)
    with pytest.raises(CheckpointError, match="damaged"):
        load_shards(tmp_path, stem="part")


# -- parts of stored tensors -------------------------------------------------------------------------------------------


def test_part_is_read_from_the_blocks_that_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_grid(tmp_path, BLOCKS)
    grid = open_shards(tmp_path, stem="part")["grid"]
    read: list[int] = []
    plain = shards.StoredBlock.read

    def count(block: shards.StoredBlock, starts: list[int], stops: list[int]) -> torch.Tensor:
        read.append(plain(block, starts, stops).numel())
        return plain(block, starts, stops)

    monkeypatch.setattr(shards.StoredBlock, "read", count)
    for top in range(6):
        for left in range(5):
            read.clear()
            part = GRID[top : top + 2, left : left + 2, 1:]
            found = grid.read((top, left, 1), part.shape)
            assert torch.equal(found, part)
            assert found.is_contiguous()
            assert sum(read) == part.numel()
            assert all(read) or part.numel() == 0, "no block is read that has nothing of it"


def test_part_of_a_file_is_read(tmp_path: Path) -> None:
    packed = torch.arange(8, dtype=torch.uint8).reshape(4, 2).view(torch.float4_e2m1fn_x2)
    tensors = {"a": GRID, "tied": GRID, "packed": packed, "number": torch.tensor(3)}
    save_tensors(tensors, tmp_path / "model.safetensors")
    found = open_tensors(tmp_path / "model.safetensors")
    assert found["a"] is found["tied"]
    assert torch.equal(found["a"].read((1, 0, 2), (3, 4, 1)), GRID[1:4, :, 2:])
    assert found["packed"].shape == packed.shape
    assert torch.equal(found["packed"].read((1, 0), (2, 2)).view(torch.uint8), packed.view(torch.uint8)[1:3])
    whole = read_whole({**found, "other": 1})
    assert whole["a"] is whole["tied"]
    assert (whole["number"], whole["other"]) == (3, 1)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(whole["a"], GRID)
