"""Checkpoints without a manifest, as transformers' Trainer writes them. Here they are ours with the manifest taken out.

The real ones are in `tests/interop/test_trainer_interchange.py`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import Stream, make_resumable, make_rows

from hftrain import CheckpointError, Trainer


def make_foreign(folder: Path, step: int, **options: Any) -> Path:
    """Save at a step, and take out what transformers' Trainer does not write, or writes as a pickle."""
    make_resumable(folder, StopAt(step), **options).train()
    found = folder / f"checkpoint-{step}"
    (found / "manifest.json").unlink()
    (found / "training_args.bin").write_bytes(b"a pickle, which is never read")
    return found


def change_state(folder: Path, **values: Any) -> None:
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def assert_same_end(resumed: Trainer, whole: Trainer) -> None:
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)
    assert resumed.state.global_step == whole.state.global_step


# 22 samples in batches of 4: step 6 is a pass's end, and with accumulation 4 so is step 2.
@pytest.mark.parametrize(("accumulation", "stop"), [(1, 2), (1, 6), (1, 8), (4, 1), (4, 2), (4, 3)])
def test_a_run_goes_on_where_its_state_says(tmp_path: Path, accumulation: int, stop: int) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    whole = make_resumable(tmp_path / "whole", **options)
    whole.train()
    resumed = make_resumable(tmp_path / "new", **options)
    resumed.train(resume_from_checkpoint=str(make_foreign(tmp_path / "old", stop, **options)))
    assert_same_end(resumed, whole)
    assert [line.get("loss") for line in resumed.state.log_history] == [
        line.get("loss") for line in whole.state.log_history
    ]


def test_a_stream_goes_on_past_its_first_end(tmp_path: Path) -> None:
    options = {"train_dataset": Stream(make_rows()), "max_steps": 14, "gradient_accumulation_steps": 2}
    whole = make_resumable(tmp_path / "whole", **options)
    whole.train()
    resumed = make_resumable(tmp_path / "new", **options)
    resumed.train(resume_from_checkpoint=str(make_foreign(tmp_path / "old", 2, **options)))
    assert_same_end(resumed, whole)


def test_what_is_taken_from_the_run_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_foreign(tmp_path, 2)
    caplog.clear()
    make_resumable(tmp_path).train(resume_from_checkpoint=str(folder))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "without proof" in said[0]
    assert "taken from this run: gradient_accumulation_steps=1, the data (22 samples)" in said[1]


def test_another_batch_size_keeps_the_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resumed = make_resumable(tmp_path / "new", per_device_train_batch_size=2)
    resumed.train(resume_from_checkpoint=str(make_foreign(tmp_path / "old", 3)))
    # 12 of 22 samples, then 5 batches of 2; and a pass of 11.
    assert resumed.state.global_step == resumed.state.max_steps == 3 + 5 + 11
    assert "sample 12 of 22" in caplog.text


@pytest.mark.parametrize(("drop_last", "num_steps"), [(True, 2 + 2 + 7), (False, 2 + 2 + 8)])
def test_batches_of_the_old_size_are_counted_as_they_were(tmp_path: Path, drop_last: bool, num_steps: int) -> None:
    options = {"dataloader_drop_last": drop_last}
    folder = make_foreign(tmp_path / "old", 2, per_device_train_batch_size=8, **options)
    resumed = make_resumable(tmp_path / "new", per_device_train_batch_size=3, **options)
    resumed.train(resume_from_checkpoint=str(folder))
    # 16 of 22 samples: all that there are to a pass where the last batch of 8 is left out.
    assert resumed.state.global_step == (2 + 7 if drop_last else num_steps)


def test_a_run_that_went_on_saves_checkpoints_of_ours(tmp_path: Path) -> None:
    whole = make_resumable(tmp_path / "whole")
    whole.train()
    make_resumable(tmp_path, StopAt(5)).train(resume_from_checkpoint=str(make_foreign(tmp_path, 2)))
    resumed = make_resumable(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, whole)


# -- found by itself, or named -----------------------------------------------------------------------------------------


def test_without_a_name_it_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_resumable(tmp_path, StopAt(2)).train()
    make_resumable(tmp_path, StopAt(5)).train(resume_from_checkpoint=True)
    foreign = tmp_path / "checkpoint-5"
    (foreign / "manifest.json").unlink()
    (foreign / "training_args.bin").write_bytes(b"a pickle, which is never read")
    resumed = make_resumable(tmp_path, StopAt(3))
    assert resumed.train(resume_from_checkpoint=True).global_step == 3
    assert f"Skipped {foreign}" in caplog.text
    assert "It has no manifest.json, which proves it whole. Name it to resume from it." in caplog.text
    named = make_resumable(tmp_path, StopAt(6))
    assert named.train(resume_from_checkpoint=str(foreign)).global_step == 6


def test_alone_it_is_not_taken_without_a_name(tmp_path: Path) -> None:
    make_foreign(tmp_path, 2)
    with pytest.raises(CheckpointError, match="no valid checkpoint with a manifest"):
        make_resumable(tmp_path).train(resume_from_checkpoint=True)


def test_each_machine_may_hold_its_own(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, 2)
    resumed = make_resumable(tmp_path, save_on_each_node=True)
    assert resumed.train(resume_from_checkpoint=str(folder)).global_step == 12
    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no optimizer\.pt"):
        make_resumable(tmp_path, save_on_each_node=True).train(resume_from_checkpoint=str(folder))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_foreign(tmp_path, 2)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        make_resumable(tmp_path).train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"])
def test_a_file_cut_short_or_that_runs_code_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_foreign(tmp_path, 2)
    content = (folder / name).read_bytes()
    for bad in (content[: len(content) // 2], b"cos\nsystem\n(S'true'\ntR."):
        (folder / name).write_bytes(bad)
        with pytest.raises(CheckpointError, match=name):
            make_resumable(tmp_path).train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("name", ["global_step2", "pytorch_model_fsdp_0", "optimizer_0"])
def test_engines_own_files_are_refused(tmp_path: Path, name: str) -> None:
    folder = make_foreign(tmp_path, 2)
    (folder / "optimizer.pt").unlink()
    (folder / name).mkdir()
    with pytest.raises(CheckpointError, match="DeepSpeed or FSDP"):
        make_resumable(tmp_path).train(resume_from_checkpoint=str(folder))


BAD = [
    {"global_step": -1}, {"global_step": 2.0}, {"global_step": None}, {"global_step": True}, {"max_steps": "12"},
    {"epoch": -0.5}, {"epoch": "1"}, {"epoch": float("nan")}, {"epoch": float("inf")}, {"train_batch_size": 0},
    {"train_batch_size": "4"},
]  # fmt: skip


@pytest.mark.parametrize("values", BAD, ids=str)
def test_a_state_that_makes_no_sense_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    folder = make_foreign(tmp_path, 2)
    change_state(folder, **values)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json.*(not numbers|damaged)"):
        make_resumable(tmp_path).train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize(
    "values", [{"epoch": 0.5}, {"epoch": 0.3334}, {"epoch": 1.0}, {"global_step": 3}, {"epoch": None}], ids=str
)
def test_steps_that_do_not_fit_the_passes_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    folder = make_foreign(tmp_path, 2)
    change_state(folder, **values)
    with pytest.raises(CheckpointError, match="gradient_accumulation_steps=1 do not give"):
        make_resumable(tmp_path).train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"train_dataset": make_rows(30)}], ids=["steps", "data"]
)
def test_another_accumulation_or_length_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = make_foreign(tmp_path, 2)
    with pytest.raises(CheckpointError, match="data and the accumulation of that run"):
        make_resumable(tmp_path, **options).train(resume_from_checkpoint=str(folder))


def test_a_batch_size_that_is_not_recorded_is_this_runs(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, 2)
    change_state(folder, train_batch_size=None)
    assert make_resumable(tmp_path).train(resume_from_checkpoint=str(folder)).global_step == 12


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "rmsprop"])
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, optim: str) -> None:
    folder = make_foreign(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        make_resumable(tmp_path, optim=optim).train(resume_from_checkpoint=str(folder))


def test_the_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, 2)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    groups = state["param_groups"]
    swapped = {**state, "state": {**state["state"], 0: state["state"][1], 1: state["state"][0]}}
    fewer = {**state, "param_groups": groups[:1]}
    coupled = {**state, "param_groups": [{**group, "decoupled_weight_decay": False} for group in groups]}
    for bad, reason in (
        (swapped, "the shape of its parameter"),
        (fewer, "parameter groups"),
        (coupled, "state of a AdamW"),
    ):
        torch.save(bad, folder / "optimizer.pt")
        with pytest.raises(CheckpointError, match=reason):
            make_resumable(tmp_path).train(resume_from_checkpoint=str(folder))


def test_the_files_of_an_older_torch_are_read(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, 2)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        group.pop("decoupled_weight_decay", None)
    torch.save(state, folder / "optimizer.pt")
    assert make_resumable(tmp_path).train(resume_from_checkpoint=str(folder)).global_step == 12


def test_one_of_our_own_without_its_manifest_is_refused(tmp_path: Path) -> None:
    make_resumable(tmp_path, StopAt(2)).train()
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json that is gone"):
        make_resumable(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_finished_run_does_no_further_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_foreign(tmp_path, 12)
    again = make_resumable(tmp_path)
    assert again.train(resume_from_checkpoint=str(folder)).global_step == 12
    assert "no step is left" in caplog.text
