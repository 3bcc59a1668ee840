"""Train towards a remote folder in a new process for each line of standard input; for the kill sweep.

A line is a JSON object, see `train`. Standard output tells the process's number, `step N` for every checkpoint that is
committed, `error TEXT`, and `dead`. Forking saves importing torch and the store's package in each round.
The number of a process that has ended stays its own until the next round, so a kill that comes late hits nobody else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import s3fs  # noqa: F401  # once, for all rounds
import torch
from support.tiny import Net, Noisy, make_arguments, make_rows

from hftrain import CheckpointError, Trainer, TrainerCallback, set_seed
from hftrain.checkpoint.manifest import checkpoint_step
from hftrain.extras.remote.folders import RemoteFolder
from hftrain.storage.files import is_url


def say(text: str) -> None:
    """Write a line at once, in one piece."""
    os.write(1, f"{text}\n".encode())


class Tell(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say(f"step {state.global_step}")


def train(*, folder: str, cache: str, max_steps: int, save_steps: int, limit: int, outcome: str | None) -> None:
    """Train from the newest checkpoint, if the folder has one, with a mirror in `cache`; write how it ended."""
    os.environ["HFTRAIN_CACHE"] = cache
    set_seed(1)
    options = {"save_strategy": "steps", "save_steps": save_steps, "max_steps": max_steps, "save_total_limit": limit}
    trainer = Trainer(
        Net(dropout=0.2),
        make_arguments(Path(folder) if not is_url(folder) else folder, logging_steps=3, **options),
        train_dataset=Noisy(make_rows(22)),
        callbacks=[Tell()],
    )
    has_some = is_url(folder) and any(checkpoint_step(name) is not None for name in RemoteFolder(folder).names())
    try:
        trainer.train(resume_from_checkpoint=has_some)
    except CheckpointError as error:
        if "There is no valid checkpoint" not in str(error):
            raise
        trainer.train()
    if outcome is not None:
        history = [entry for entry in trainer.state.log_history if "train_loss" not in entry]
        state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(), "history": history}
        torch.save(state, outcome)


def main() -> None:
    pid = None
    for line in sys.stdin:
        if pid is not None and (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) not in (0, -signal.SIGKILL):
            say(f"error the last process ended with {code}")
        if not is_url(json.loads(line)["folder"]):
            # Here, so that later rounds find imported what a run imports on first use.
            say(f"pid {os.getpid()}")
            train(**json.loads(line))
            say("dead")
            continue
        alive, hold = os.pipe()
        pid = os.fork()
        if pid == 0:
            say(f"pid {os.getpid()}")
            try:
                train(**json.loads(line))
            except BaseException as error:
                say(f"error {type(error).__name__}: {error}".replace("\n", " "))
                os._exit(1)
            os._exit(0)
        os.close(hold)
        os.read(alive, 1)  # until the process, which holds the other end, is gone
        os.close(alive)
        say("dead")


if __name__ == "__main__":
    main()
