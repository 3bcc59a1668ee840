"""A network that breaks: what is said, how long it takes, who is left alone, and how the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.machines import NAMES, two_machines

pytestmark = pytest.mark.machines

# Far below ddp_timeout (30 minutes), and above what any machine needs.
SOON_S = 90
LIMIT = {"HFTRAIN_LINK_TIMEOUT_S": "6"}
SCRIPT = """
import ctypes, os, signal, time
from pathlib import Path
from support.tiny import Net, make_arguments, make_rows
from hftrain import Trainer, TrainerCallback, set_seed

RESTART, RANK, STOPS_AT = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], {stops_at}

class Watched(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)
        if state.global_step == 5:
            print(f"AT 5, ATTEMPT {{RESTART}}", flush=True)
        if state.global_step == 10 and STOPS_AT and RANK == "1":
            ctypes.PyDLL(None).sleep(12)  # which keeps the interpreter's lock
            print("WAS BUSY", flush=True)
        if state.global_step == STOPS_AT and RANK == "1":
            print("TO BE STOPPED", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

set_seed(3)
options = {{"max_steps": {max_steps}, "logging_steps": 500, "resume_from_checkpoint": "auto"}}
options |= {{"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}}
trainer = Trainer(Net(), make_arguments(Path("run"), **options), train_dataset=make_rows(24), callbacks=[Watched()])
trainer.train()
print(f"DONE AT {{trainer.state.global_step}}, ATTEMPT {{RESTART}}", flush=True)
if RANK == "0":
    time.sleep(12)  # rank 1 is long gone, as it may be
"""


def script(*, max_steps: int = 4000, stops_at: int = 0) -> str:
    return SCRIPT.format(max_steps=max_steps, stops_at=stops_at)


@pytest.mark.parametrize("cut", NAMES)
def test_cut_link_ends_all_ranks_soon_and_names_the_one_that_is_gone(tmp_path: Path, cut: str) -> None:
    with two_machines(tmp_path) as machines:
        for name in NAMES:
            machines.start(name, script(), "--nnodes=2", "--nproc-per-node=2", env=LIMIT)
        machines.until(lambda: all("AT 5" in machines.log(name) for name in NAMES))
        machines.unplug(cut)
        machines.until(lambda: not (machines.workers("north") or machines.workers("south")), SOON_S)
        silent = "its machine has not answered for 6 s"
        north, south = map(machines.log, NAMES)
    assert any(f"ended, because rank {rank} on south is gone: {silent}" in north for rank in (2, 3))
    assert south.count(f"ended, because rank 0 on north is gone: {silent}") == 2


def test_ranks_that_are_busy_stopped_or_done_are_not_gone(tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        for name in NAMES:
            machines.start(name, script(max_steps=20, stops_at=15), env=LIMIT)
        machines.until(lambda: "TO BE STOPPED" in machines.log("south"))
        (stopped,) = machines.workers("south")
        with pytest.raises(AssertionError):
            machines.until(lambda: "is gone" in machines.log("north"), timeout_s=12)
        stopped.send_signal(signal.SIGCONT)
        assert [machines.wait(name) for name in NAMES] == [0, 0]
        assert "WAS BUSY" in machines.log("south")
        for name in NAMES:
            assert "DONE AT 20" in machines.log(name)
            assert "is gone" not in machines.log(name)


def test_run_is_restarted_and_goes_on_when_the_link_is_back(tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        for name in NAMES:
            machines.start(name, script(max_steps=60), "--nnodes=2", "--max-restarts=1", env=LIMIT)
        machines.until(lambda: all("AT 5, ATTEMPT 0" in machines.log(name) for name in NAMES))
        machines.unplug("south")
        machines.until(lambda: all("is gone" in machines.log(name) for name in NAMES), SOON_S)
        machines.plug("south")
        assert [machines.wait(name) for name in NAMES] == [0, 0]
        for name in NAMES:
            assert "AT 5, ATTEMPT 1" not in machines.log(name)  # it resumed
            assert "DONE AT 60, ATTEMPT 1" in machines.log(name)
