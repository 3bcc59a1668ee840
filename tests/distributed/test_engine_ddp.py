"""An `Engine` on two processes: equal to one process by hand, resumed to the bit, also after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import DistributedRun
from support.engines import (
    check_that_it_equals_one_process_and_resumes,
    make_optimizer,
    train,
)
from support.tiny import Net

from hftrain import CheckpointError, ConfigError, Engine
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16")])
def test_training_equals_one_process_and_resumes(
    run_distributed: Callable[..., list[Any]], strategy: str, precision: str
) -> None:
    check_that_it_equals_one_process_and_resumes(run_distributed, strategy, precision)


def save_in_two(strategy: str, folder: str) -> None:
    train(Path(folder), strategy=create_strategy(strategy, use_cpu=True), shuffle=False, num_steps=4, save_at=4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_goes_on_with_what_two_saved(
    run_distributed: Callable[..., list[Any]], tmp_path: Path, strategy: str
) -> None:
    run_distributed(save_in_two, strategy=strategy, folder=str(tmp_path))
    resumed = train(tmp_path, strategy="single", shuffle=False, num_steps=5)
    # 44 samples are 11 batches; two processes have read 8 rounds of two: an epoch of 6, and two more.
    assert (resumed["start"], resumed["epoch"], len(resumed["losses"])) == (4, 1, 2)


def kill_one(folder: str) -> None:
    save = Engine.save

    def save_and_kill(self: Engine, step: int) -> Path:
        path = save(self, step)
        self.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
        return path

    Engine.save = save_and_kill  # type: ignore[method-assign]
    train(Path(folder), strategy=create_strategy("ddp", use_cpu=True), dropout=0.2, save_at=4)


def finish(folder: str) -> list[Any]:
    resumed = train(Path(folder), strategy=create_strategy("ddp", use_cpu=True), dropout=0.2)
    whole = train(Path("whole"), strategy=create_strategy("ddp", use_cpu=True), dropout=0.2)
    return [resumed["start"], resumed["weights"] == whole["weights"]]


def test_killed_run_goes_on(
    launch_distributed: Callable[..., DistributedRun], run_distributed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert launch_distributed(kill_one, kwargs={"folder": str(tmp_path)}, forks=True).returncode != 0
    assert run_distributed(finish, folder=str(tmp_path)) == [[4, True]] * 2


def misuse(folder: str) -> list[str]:
    told = []
    with Engine(strategy=create_strategy("ddp", use_cpu=True), output_dir=folder) as engine:
        for act, kind in (
            (lambda: engine.shard([0] * (1 + engine.rank)), ConfigError),
            (lambda: engine.load(Path(folder) / "nowhere"), CheckpointError),
        ):
            if kind is CheckpointError:
                engine.setup(Net(), make_optimizer)
            with pytest.raises(kind) as caught:
                act()
            told.append(str(caught.value))
        assert engine.reduce(torch.tensor(float(engine.rank)), "mean") == 0.5
        assert engine.gather(torch.full((1 + engine.rank,), engine.rank)).tolist() == [0, 1, 1]
    return told


def test_every_process_hears_of_a_mistake(run_distributed: Callable[..., list[Any]], tmp_path: Path) -> None:
    answers = run_distributed(misuse, folder=str(tmp_path))
    assert answers[0] == answers[1]
    assert "different numbers of batches" in answers[0][0]
    assert "does not exist" in answers[0][1]


def read_weights(strategy: str) -> list[Any]:
    with Engine(strategy=create_strategy(strategy, use_cpu=True)) as engine:
        net = Net()
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        engine.setup(net, make_optimizer)
        found = dict(engine.weights())
        return [list(found) == list(expected), all(torch.equal(found[name], expected[name]) for name in expected)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_process_can_read_whole_weights(run_distributed: Callable[..., list[Any]], strategy: str) -> None:
    assert run_distributed(read_weights, strategy=strategy) == [[True, True]] * 2


def step_on_gradients_of_its_own() -> list[str]:
    """Step after a window that was cut short, and then after a whole one."""
    told = []
    with Engine(strategy=create_strategy("ddp", use_cpu=True)) as engine:
        engine.setup(torch.nn.Linear(2, 1), lambda bare: torch.optim.SGD(bare.parameters(), lr=0.1))
        for last in (False, True):
            engine.forward_backward(torch.ones(1, 2) * (engine.rank + 1), lambda m, x: m(x).sum(), is_last=last)
            try:
                engine.optim_step()
            except ConfigError as error:
                told.append(str(error))
        told += [str(value) for _, value in engine.weights()]
    return told


def test_a_step_without_a_last_micro_batch_is_refused(run_distributed: Callable[..., list[Any]]) -> None:
    """Each process would update with its own gradients, and their weights would part."""
    first, second = run_distributed(step_on_gradients_of_its_own)
    assert "is_last was False for the last micro-batch" in first[0]
    assert first == second
