"""The documented names."""

from __future__ import annotations

import pytest

from hftrain.checkpoint.layout import checkpoint_name, checkpoint_step, is_part, list_checkpoints, rng_name


@pytest.mark.parametrize("step", [0, 7, 500, 10**9])
def test_checkpoint_name_and_step_are_inverse(step):
    assert checkpoint_step(checkpoint_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["checkpoint", "checkpoint-", "checkpoint-07", "checkpoint--1", "checkpoint-5x", "xcheckpoint-5", "checkpoint-٣"],
)
def test_checkpoint_step_knows_no_other_name(name):
    assert checkpoint_step(name) is None


def test_list_checkpoints_orders_by_number_and_skips_files(tmp_path):
    for step in (100, 20, 3):
        (tmp_path / checkpoint_name(step)).mkdir()
    (tmp_path / "checkpoint-7").write_text("")
    (tmp_path / "runs").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]


def test_list_checkpoints_of_an_absent_folder_is_empty(tmp_path):
    assert list_checkpoints(tmp_path / "absent") == []


def test_rng_name_counts_ranks_only_where_there_are_several():
    assert rng_name(rank=0, world_size=1) == "rng_state.pth"
    assert rng_name(rank=1, world_size=2) == "rng_state_1.pth"


@pytest.mark.parametrize(
    ("name", "is_read"),
    [("optimizer.pt", True), ("rng_state_12.pth", True), ("pytorch_model.bin", True), ("README.md", False)],
)
def test_is_part_names_what_a_resume_reads(name, is_read):
    assert is_part(name) is is_read
