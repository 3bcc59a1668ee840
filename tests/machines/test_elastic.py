"""A machine that goes and comes back: the run goes on with one, then with two, and trains what it must."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machines import NAMES, two_machines
from support.tiny import Net, make_rows

from hftrain import set_seed

pytestmark = pytest.mark.machines

NUM_ROWS, RATE = 64, 0.05
SCRIPT = """
import json, os, time
from pathlib import Path
import torch
from support.tiny import Net, make_arguments, make_rows
from hftrain import StepOutput, TaskModule, Trainer, TrainerCallback, set_seed

class Told(TaskModule):
    def training_step(self, batch):
        ids = batch.pop("id")
        state, world = trainer.state, trainer.args.world_size
        print("STEP", json.dumps([start, state.global_step, int(state.epoch + 1e-6), world, ids.tolist()]), flush=True)
        return StepOutput(loss=self.model(**batch)[0])

class Ends(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        global start, end
        start = trainer.strategy.broadcast_object(time.monotonic_ns())
        end = state.global_step + 6 if args.world_size == 2 and Path("returned").exists() else 10**6
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.2)
        control.should_training_stop = state.global_step == end

set_seed(3)
rows = [{**row, "id": torch.tensor(number)} for number, row in enumerate(make_rows(%d))]
options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "resume_from_checkpoint": "auto"}
options |= {"max_steps": 10**6, "optim": "sgd", "learning_rate": %s, "lr_scheduler_type": "constant"}
options |= {"max_grad_norm": 0, "logging_steps": 10**6, "dataloader_drop_last": True}
trainer = Trainer(Told(Net()), make_arguments(Path("run"), **options), train_dataset=rows, callbacks=[Ends()])
trainer.train()
if trainer.state.global_step == end and os.environ["RANK"] == "0":
    torch.save(trainer.model.state_dict(), "final.pt")
""" % (NUM_ROWS, RATE)  # noqa: UP031 - it is full of braces
ELASTIC = ("--nnodes=1:2", "--max-restarts=5", "--rdzv-conf=last_call_timeout=10")
# Without it a new agent waits in vain for the address that torch's agents tell each other once (torch 2.13).
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Steps = dict[int, tuple[int, int, list[int]]]


def read_steps(*logs: str) -> Steps:
    """Return epoch, processes and samples by step, of the steps that no later start has taken back."""
    told = [json.loads(line[5:]) for log in logs for line in log.splitlines() if line.startswith("STEP [")]
    steps: Steps = {}
    for _, group in groupby(sorted(told, key=lambda each: each[0]), key=lambda each: each[0]):
        lines = list(group)
        begin = min(line[1] for line in lines)
        steps = {step: found for step, found in steps.items() if step < begin}
        for _, step, epoch, world, ids in lines:
            steps[step] = epoch, world, sorted([*steps.get(step, (0, 0, []))[2], *ids])
    return steps


def train_by_hand(steps: Steps) -> dict[str, Any]:
    """Take the same steps without hftrain and without processes."""
    set_seed(3)
    model, rows = Net(), make_rows(NUM_ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(len(steps)):
        chosen = [rows[number] for number in steps[step][2]]
        batch = {name: torch.stack([row[name] for row in chosen]) for name in ("x", "labels")}
        optimizer.zero_grad()
        model(**batch)[0].backward()
        optimizer.step()
    return model.state_dict()


def test_run_goes_on_with_one_machine_and_then_with_two(tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        for name in NAMES:
            machines.start(name, SCRIPT, *ELASTIC, env=ENV)

        def has_come(world: int, steps: int) -> bool:
            return sum(found[1] == world for found in read_steps(*map(machines.log, NAMES)).values()) >= steps

        machines.until(lambda: has_come(2, 5))
        machines.kill("south")
        machines.until(lambda: has_come(1, 5))
        (tmp_path / "returned").touch()
        machines.start("south", SCRIPT, *ELASTIC, env=ENV)
        assert machines.wait("north") == 0
        steps = read_steps(*map(machines.log, NAMES))
    assert sorted(steps) == list(range(len(steps)))
    worlds = [world for world, _ in groupby(steps[step][1] for step in sorted(steps))]
    assert worlds[-3:] == [2, 1, 2]
    for epoch, group in groupby((steps[step] for step in sorted(steps)), key=lambda found: found[0]):
        seen = [number for found in group for number in found[2]]
        is_last = epoch == steps[max(steps)][0]
        assert len(set(seen)) == len(seen)
        assert is_last or len(seen) > NUM_ROWS - 8
    expected = train_by_hand(steps)
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-5, atol=1e-6)
