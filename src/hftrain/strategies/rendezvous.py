"""A place in the launcher's store that belongs to these very processes, and not to any that ran before them."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from hftrain.core.errors import StrategyError
from hftrain.strategies.board import Board

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


def fresh_place(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Agree on a part of a store that is empty. Collective.

    A launcher that starts failed processes again (`torchrun --max-restarts`) may keep its store, and in it what the
    processes before have left: addresses at which nobody answers, and notes of errors that are over. A count of the
    restarts does not tell them apart, for launchers on several machines count their own. So each process signs with a
    name that it makes up, rank 0 proposes the list of names that it finds, and all go where a list leads that each has
    found itself on.

    Args:
        store: What the launcher shares.
        rank: This process.
        world_size: How many there are.
        timeout: How long to wait for the others.

    Raises:
        StrategyError: They did not all come.
    """
    board, own = Board(PrefixStore("hftrain/rendezvous", store)), uuid.uuid4().hex
    board.post(f"name/{rank}", own)
    deadline_s, pause_s = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_S
    proposed = None
    while time.monotonic() < deadline_s:
        if rank == 0:
            names = [board.read(f"name/{each}") for each in range(world_size)]
            if None not in names and names != proposed:
                proposed = names
                board.post("proposal", json.dumps(names))
        found = json.loads(board.read("proposal") or "[]")
        if len(found) == world_size and found[rank] == own:
            place = hashlib.sha256("".join(found).encode()).hexdigest()[:16]
            board.post(f"agrees/{rank}", place)
            if rank == 0 and all(board.read(f"agrees/{each}") == place for each in range(world_size)):
                board.post("agreed", place)
            if board.read("agreed") == place:
                return PrefixStore(f"hftrain/{place}", store)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise StrategyError(
        f"Rank {rank} of {world_size} waited for the other processes to start.",
        f"They did not all come within {timeout.total_seconds():g} s.",
        "Look into the logs of the others, or raise ddp_timeout.",
    )
