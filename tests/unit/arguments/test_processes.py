from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from hftrain import Seq2SeqTrainingArguments, TrainingArguments
from hftrain.adapter.strategy import forget_devices


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def launch(monkeypatch, *, rank: int, local_rank: int, world_size: int = 4) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))


def test_single_process_is_everything():
    args = TrainingArguments("out", per_device_train_batch_size=3, per_device_eval_batch_size=5, ddp_timeout=60)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.train_batch_size, args.eval_batch_size) == (3, 5)
    assert args.parallel_mode.value == "not_parallel"
    assert args.should_log
    assert args.should_save
    assert args.place_model_on_device
    assert args.ddp_timeout_delta == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("rank", "local_rank", "each_node", "expected"),
    [(0, 0, True, True), (2, 0, True, True), (2, 0, False, False), (3, 1, True, False), (0, 0, False, True)],
)
def test_node_settings_decide_who_logs_and_saves(monkeypatch, rank, local_rank, each_node, expected):
    args = TrainingArguments("out", log_on_each_node=each_node, save_on_each_node=each_node)
    launch(monkeypatch, rank=rank, local_rank=local_rank)
    assert (args.should_log, args.should_save) == (expected, expected)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 0),
        ({"warmup_ratio": 0.05}, 6),
        ({"warmup_ratio": 0.5, "warmup_steps": 3}, 3),
        ({"warmup_steps": 0.05, "warmup_ratio": None}, 6),
    ],
)
def test_warmup_steps_win_over_the_ratio(given, steps):
    assert TrainingArguments("out", **given).get_warmup_steps(101) == steps


def test_device_is_the_cpu_when_asked():
    args = TrainingArguments("out", use_cpu=True)
    assert (args.device, args.n_gpu) == (torch.device("cpu"), 0)


@pytest.mark.parametrize(("num_gpus", "index"), [(4, 3), (1, 0)])
def test_device_is_the_only_gpu_that_a_launcher_shows_a_process(monkeypatch, num_gpus, index):
    # A stand-in: the number of GPUs is pretended.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_gpus)
    launch(monkeypatch, rank=3, local_rank=3)
    assert TrainingArguments("out").device == torch.device("cuda", index)


@pytest.mark.cuda
def test_device_is_the_gpu_of_the_local_rank():
    args = TrainingArguments("out")
    assert (args.device, args.n_gpu) == (torch.device("cuda", 0), 1)


def test_main_process_first_does_nothing_alone():
    with Seq2SeqTrainingArguments("out").main_process_first(desc="mapping"):
        assert not torch.distributed.is_initialized()


def work_in_turn() -> list[bool]:
    """Let rank 0 leave a file behind, late, and see whether every rank finds it; by node, then over the whole run."""
    args, found = TrainingArguments("out", use_cpu=True, ddp_timeout=60), []
    for local in (True, False):
        done = Path(f"done_{local}")
        with args.main_process_first(local=local, desc="mapping"):
            if args.process_index == 0:
                time.sleep(0.5)
                done.touch()
            found.append(done.exists())
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.distributed
def test_main_process_first_makes_the_others_wait(run_distributed):
    assert run_distributed(work_in_turn) == [[True, True], [True, True]]


def test_distributed_state_is_accelerates(tmp_path):
    from accelerate import PartialState

    state = TrainingArguments(str(tmp_path), use_cpu=True).distributed_state
    assert isinstance(state, PartialState)
    assert (state.num_processes, state.device.type) == (1, "cpu")
    PartialState._reset_state()


def test_number_of_devices_that_a_script_sets_wins(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    args = TrainingArguments(str(tmp_path), report_to="none")
    assert args.n_gpu == args._n_gpu == 4
    args._n_gpu = 1
    forget_devices(args, None)
    assert (args.n_gpu, args.train_batch_size) == (1, args.per_device_train_batch_size)
