"""Processes that hang or are slow: where each of them stands, and which one the others wait for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Noisy, make_arguments, make_rows

from hftrain import FlightLog, Trainer, TrainerCallback, set_seed
from hftrain.cli.hangs import show_hangs

pytestmark = pytest.mark.distributed


def train(folder: Path, *callbacks: Any, rows: Any = None, flight_log: Any = True) -> None:
    set_seed(3)
    args = make_arguments(folder, num_train_epochs=2, per_device_train_batch_size=3, learning_rate=0.01)
    trainer = Trainer(
        Net(), args, train_dataset=make_rows(30) if rows is None else rows, strategy="ddp", callbacks=list(callbacks),
        flight_log=flight_log,
    )  # fmt: skip
    trainer.train()
    trainer.strategy.close()


def wait_for_places(folder: Path) -> None:
    """Wait until both processes have told where they stood in step 4."""
    deadline = time.monotonic() + 60
    places = [folder / "flight" / f"place-rank{rank}.json" for rank in range(2)]
    while time.monotonic() < deadline:
        if all(path.exists() and '"step 4' in path.read_text() for path in places):
            return
        time.sleep(0.05)


class Slow(Noisy):
    """Let the second process wait in its fourth batch, or take its time for each."""

    def __init__(self, folder: str, *, rank: int, naps: bool) -> None:
        super().__init__(make_rows(60))
        self.folder, self.rank, self.naps, self.num_read = Path(folder), rank, naps, 0

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        if self.rank == 1 and self.naps:
            time.sleep(0.02)
        elif self.rank == 1 and self.num_read == 13:
            self.fall_asleep()
        return super().__getitem__(index)

    def fall_asleep(self) -> None:
        wait_for_places(self.folder)


class Elsewhere(TrainerCallback):
    """Let the second process wait in a collective that the first one enters late."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.group = torch.distributed.new_group(backend="gloo")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and args.process_index == 1:
            self.enter()
        elif state.global_step == 3:
            threading.Thread(target=self.come_late, args=[Path(args.output_dir)]).start()

    def come_late(self, folder: Path) -> None:
        wait_for_places(folder)
        self.enter()

    def enter(self) -> None:
        torch.distributed.all_reduce(torch.ones(3), group=self.group)


def train_hanging(folder: str, case: str) -> None:
    rank = int(os.environ["RANK"])
    callbacks = [Elsewhere()] if case == "elsewhere" else []
    rows = None if callbacks else Slow(folder, rank=rank, naps=case == "naps")
    # The steps before the fourth may take longer on a busy machine: then they are told, too, and the fourth later.
    flight_log = FlightLog(hang_timeout_s=None if case == "naps" else 1.5)
    train(Path(folder), *callbacks, rows=rows, flight_log=flight_log)


def test_a_rank_that_is_asleep_in_its_data_is_named(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(train_hanging, folder=str(tmp_path), case="asleep")
    answer = show_hangs(str(tmp_path))
    waiting, asleep = answer.data["stacks"]
    assert (waiting["ranks"], asleep["ranks"]) == ([0], [1])
    assert "rank 1, apart from the others:" in answer
    assert "fall_asleep" in [name for _, _, name in asleep["frames"]]
    assert asleep["phase"] == "step 4, data"
    assert asleep["collective"] == ""
    assert waiting["phase"] in ("step 4, forward", "step 4, backward")
    assert waiting["collective"].startswith("gloo:all_reduce ")
    assert answer.data["silent"] == {}


def test_ranks_in_different_collectives_are_told_apart(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(train_hanging, folder=str(tmp_path), case="elsewhere")
    places = {each["ranks"][0]: each for each in show_hangs(str(tmp_path)).data["stacks"]}
    assert places[1]["phase"] == "step 4"
    assert places[1]["collective"].startswith("gloo:all_reduce 1 of group ")
    assert places[1]["collective"].endswith(": Float[3]")
    assert places[0]["phase"] in ("step 4, forward", "step 4, backward")
    assert places[0]["collective"].split(" of ")[1].split(":") != places[1]["collective"].split(" of ")[1].split(":")


def test_the_rank_that_was_waited_for_is_named_with_its_phase(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(train_hanging, folder=str(tmp_path), case="naps")
    answer = show_hangs(str(tmp_path))
    assert answer.data["stacks"] == []
    split = answer.data["split"]
    assert split["steps"] == 20
    assert (split["waited"]["rank"], split["waited"]["phase"]) == (1, "data")
    assert split["waited"]["ms"] > 50
    assert answer[-1].startswith(f"rank 1 was waited for in {split['waited']['steps']} of 20 steps, in data: ")


class Fails(TrainerCallback):
    """Let the second process fail while the first one is busy."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and args.process_index == 1:
            raise ValueError("boom")
        if state.global_step == 3:
            self.be_busy()

    def be_busy(self) -> None:
        time.sleep(120)


def train_failing(folder: str) -> None:
    train(Path(folder), Fails())


def test_a_process_tells_where_it_stands_before_the_heartbeat_ends_it(launch_distributed: Any, tmp_path: Path) -> None:
    ended = launch_distributed(train_failing, kwargs={"folder": str(tmp_path)}, forks=True)
    assert "ended, because rank 1 failed: ValueError: boom" in ended.output
    answer = show_hangs(str(tmp_path))
    (busy,) = answer.data["stacks"]
    assert busy["ranks"] == [0]
    assert busy["frames"][0][2] == "be_busy"
    assert (busy["phase"], busy["collective"]) == ("step 4", "")
    assert "rank 1 has written no stack. Its last phase: step 4, ended." in answer
