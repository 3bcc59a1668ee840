"""A part of the launcher's store that only the current processes use."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from hftrain.core.errors import StrategyError
from hftrain.preemption.board import Board

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


def fresh_place(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Agree on an unused prefix of a store. Collective.

    A launcher that restarts failed processes (`torchrun --max-restarts`) may keep its store with stale entries:
    addresses and error notes of earlier processes. A restart count cannot distinguish them, because launchers on
    several machines count separately. Instead each process posts a random name, rank 0 proposes the list of names that
    it finds, and all ranks use the prefix derived from a list once each of them has found its own name in it.

    Raises:
        StrategyError: Not all processes arrived in time.
    """
    board, name = Board(PrefixStore("hftrain/rendezvous", store)), uuid.uuid4().hex
    board.post(f"name/{rank}", name)
    deadline_s, pause_s = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_S
    last_names = None
    while time.monotonic() < deadline_s:
        if rank == 0:
            names = [board.read(f"name/{each}") for each in range(world_size)]
            if None not in names and names != last_names:
                last_names = names
                board.post("proposal", json.dumps(names))
        proposal = json.loads(board.read("proposal") or "[]")
        if len(proposal) == world_size and proposal[rank] == name:
            prefix = hashlib.sha256("".join(proposal).encode()).hexdigest()[:16]
            board.post(f"agrees/{rank}", prefix)
            if rank == 0 and all(board.read(f"agrees/{each}") == prefix for each in range(world_size)):
                board.post("agreed", prefix)
            if board.read("agreed") == prefix:
                return PrefixStore(f"hftrain/{prefix}", store)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise StrategyError(
        f"Rank {rank} of {world_size} waited for the other processes to start.",
        f"Not all of them connected within {timeout.total_seconds():g} s.",
        "Look into the logs of the others, or raise ddp_timeout.",
    )
