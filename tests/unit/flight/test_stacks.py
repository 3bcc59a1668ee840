"""Stacks that processes write, and the groups that they form."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, FlightLog, Trainer, TrainerCallback
from hftrain.cli.hangs import show_hangs

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGQUIT"), reason="Windows has no SIGQUIT")


class Sleepy(TrainerCallback):
    def __init__(self, seconds: float, *, sends: bool) -> None:
        self.seconds, self.sends = seconds, sends

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.stand_here()

    def stand_here(self) -> None:
        if self.sends:
            os.kill(os.getpid(), signal.SIGQUIT)
        time.sleep(self.seconds)


@pytest.mark.parametrize(("seconds", "timeout_s"), [(0.0, None), (1.5, 0.5)])
def test_a_process_tells_where_it_stands(tmp_path: Path, seconds: float, timeout_s: float | None) -> None:
    other, before = threading.Event(), signal.getsignal(signal.SIGQUIT)
    thread = threading.Thread(target=other.wait, daemon=True)
    thread.start()
    log = FlightLog(hang_timeout_s=timeout_s)
    args = make_arguments(tmp_path, max_steps=5)
    callbacks = [Sleepy(seconds, sends=timeout_s is None)]
    Trainer(Net(), args, train_dataset=make_rows(20), callbacks=callbacks, flight_log=log).train()
    other.set()
    text = "\n".join(show_hangs(str(tmp_path)))
    assert "rank 0:" in text
    assert "stand_here  test_stacks.py" in text
    # Nothing waits any more, and the signal is as before.
    assert signal.getsignal(signal.SIGQUIT) is before


def test_ranks_that_stand_apart_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "flight"
    folder.mkdir()
    same = 'Thread 0x01 (most recent call first):\n  File "x.py", line 1 in wait\n\n'
    for rank in range(4):
        where = ("loader.py", 7, "fetch") if rank == 2 else ("ops.py", 3, "all_reduce")
        main = f'Current thread 0x02 (most recent call first):\n  File "{where[0]}", line {where[1]} in {where[2]}\n'
        (folder / f"stacks-rank{rank}.txt").write_text(same + main)
    answer = show_hangs(str(tmp_path))
    assert [each["ranks"] for each in answer.data] == [[0, 1, 3], [2]]
    assert "rank 2, apart from the others:" in answer
    assert "    fetch  loader.py:7" in answer


def test_runs_without_stacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SIGQUIT"):
        show_hangs(str(tmp_path))
