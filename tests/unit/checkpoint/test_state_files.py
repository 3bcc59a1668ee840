"""Each file of a checkpoint, written and read."""

from __future__ import annotations

import pytest
import torch

from hftrain.checkpoint import state_files
from hftrain.core.errors import CheckpointError
from hftrain.core.seed import capture_rng
from hftrain.core.state import TrainerState
from hftrain.storage.tensors import save_containers

LOADERS = {
    "optimizer.pt": state_files.load_optimizer,
    "scheduler.pt": lambda folder: state_files.load_part(folder, "scheduler.pt"),
    "scaler.pt": lambda folder: state_files.load_part(folder, "scaler.pt"),
    "trainer_state.json": state_files.load_trainer_state,
    "training_args.bin": lambda folder: state_files.load_part(folder, "training_args.bin"),
    "rng_state.pth": lambda folder: state_files.load_process_state(folder, rank=0, world_size=1),
}


def test_rng_of_another_number_of_ranks_is_missed(tmp_path):
    save_containers(capture_rng(), tmp_path / "rng_state.pth")
    with pytest.raises(CheckpointError, match=r"rng_state_0\.pth.*does not exist"):
        state_files.load_process_state(tmp_path, rank=0, world_size=2)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("content", [None, b"", b"\x80\x04}.", b"[1]", b"\xff\xff"])
def test_absent_and_damaged_parts_are_named(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        LOADERS[name](tmp_path)


@pytest.mark.parametrize("name", sorted(set(LOADERS) - {"trainer_state.json"}))
def test_parts_that_are_no_dictionary_are_refused(tmp_path, name):
    torch.save([1], tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}.*holds a list"):
        LOADERS[name](tmp_path)


def test_callback_whose_state_came_to_hold_a_tensor_is_named(tmp_path):
    state = TrainerState(stateful_callbacks={"Fine": {"args": {}}, "Average": {"attributes": {"mean": torch.ones(2)}}})
    with pytest.raises(CheckpointError, match=r"cannot hold the state of Average: .*Tensor"):
        state_files.save_trainer_state(state, tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_state_may_be_ten_times_as_large_as_other_files(tmp_path, monkeypatch):
    state = TrainerState(log_history=[{"loss": 0.5, "step": step} for step in range(200)])
    state_files.save_trainer_state(state, tmp_path)
    monkeypatch.setattr("hftrain.storage.files._MAX_JSON_VALUES", 100)
    assert state_files.load_trainer_state(tmp_path) == state
    monkeypatch.setattr("hftrain.storage.files._MAX_JSON_VALUES", 10)
    with pytest.raises(CheckpointError, match="it holds more than 100 values"):
        state_files.load_trainer_state(tmp_path)


def test_windows_are_merged_and_random_numbers_shared_out() -> None:
    states = [
        {
            "cpu": rank,
            "loss_window": {
                "sum": torch.tensor(2.0 + rank),
                "pending": [torch.tensor(1.0 * rank)],
                "num_finite": 2 * rank,
                "num_steps": 3,
            },
            "log_window": {"sums": {"a": 1.0 + rank}, "counts": {"a": 1}} if rank else {},
        }
        for rank in range(2)
    ]
    first, third = state_files.share_out(states, rank=0), state_files.share_out(states, rank=2)
    assert (first["cpu"], third["cpu"]) == (0, 1)
    assert first["loss_window"] == {
        "sum": torch.tensor(2.5), "pending": [torch.tensor(0.5)], "num_finite": 1.0, "num_steps": 3,
    }  # fmt: skip
    assert (first["log_window"], third["log_window"]) == ({"sums": {"a": 2.0}, "counts": {"a": 1}}, {})
    empty = {"sum": None, "pending": [], "num_finite": 0}
    assert state_files.share_out([{"loss_window": empty}] * 2, rank=0) == {"loss_window": empty}
