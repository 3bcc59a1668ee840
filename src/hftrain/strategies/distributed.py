"""The base of strategies with a torch process group: rendezvous, collectives and shutdown."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import itertools
import json
import os
import socket
import sys
import time
import uuid
from datetime import timedelta
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parameter import is_lazy

from hftrain.core.devices import find_device_type
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.launcher import accelerate_state, announce_launch, read_launch
from hftrain.core.log import get_logger, warn_once
from hftrain.core.parameters import stored_in
from hftrain.core.types import PrecisionPolicy
from hftrain.preemption.consensus import Board
from hftrain.strategies.base import Strategy
from hftrain.strategies.links import link_timeout_s
from hftrain.strategies.ranks import GroupRanks
from hftrain.strategies.watch import RankWatch

# A backend thread may still hold tensors of the last collective and needs the interpreter to release them. If the
# interpreter has already shut down, the thread aborts the process after a successful run.
_DRAIN_S = 0.1
_meetings = itertools.count()
_boards = itertools.count()


class DistributedStrategy(GroupRanks, Strategy):
    """Join the processes that a launcher started, or form a group of one.

    Args:
        use_cpu: Use the CPU even if there are accelerators.
        backend: The documented `ddp_backend` (``"nccl"``, ``"gloo"``, ...); None selects the device's backend.
        timeout_s: The documented `ddp_timeout`: how long a process waits for the others.
        place_model: Whether `setup` moves the model; False for a model that is already dispatched or quantized.

    Attributes:
        follower: Checks that a step's gradients were exchanged; set by `setup`, None if there is nothing to check.

    Units:
        timeout_s: seconds.

    Raises:
        ConfigError: This torch build lacks the backend, or the backend does not support the device.
    """

    follower: Any = None

    def __init__(
        self,
        *,
        use_cpu: bool = False,
        backend: str | None = None,
        timeout_s: float = 1800,
        place_model: bool = True,
    ) -> None:
        super().__init__(torch.device(find_device_type(use_cpu=use_cpu)), place_model=place_model)
        launch = read_launch()
        self.rank, self.local_rank, self.world_size = launch.rank, launch.local_rank or 0, launch.world_size
        self.backend = backend or dist.Backend.default_device_backend_map.get(self.device_type)
        self.timeout = timedelta(seconds=timeout_s)
        self._link_timeout_s = link_timeout_s()
        self._owns_group = False
        self._owns_accelerate_state = False
        self._excepthooks = (sys.excepthook, sys.excepthook)
        if self.backend is not None:
            check_backend(self.backend, self.device_type)

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        return "torch has no process group that serves MPS" if device_type == "mps" else None

    def launch(self) -> None:
        """Join the process group and select the device; a second call changes nothing. Collective.

        Uses the existing process group if there is one, otherwise the launcher's, otherwise a group of one process.

        Raises:
            ConfigError: See `check_processes`.
            StrategyError: Fewer processes joined than the launcher announced.
        """
        if self._device is not None:
            return
        self.check_processes()
        spare_forked_processes()
        if dist.is_initialized():
            device = self._join()
        else:
            hook = sys.excepthook
            device = self._meet() if read_launch().world_size > 1 else self._stay_alone()
            self._owns_group, self._excepthooks = True, (hook, sys.excepthook)
            atexit.register(self.close)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self._owns_group and self._has_store():
            # Processes on one machine do not need the network.
            timeout_s = 0.0 if read_launch().local_world_size == self.world_size else self._link_timeout_s
            self.watch = RankWatch(
                self.make_board, rank=self.rank, world_size=self.world_size, link_timeout_s=timeout_s
            )
            self.watch.timeout_s = self.timeout.total_seconds()
        self._take(device)

    def close(self) -> None:
        """Leave the process group if `launch` created it; safe to call twice. Collective, except after an error."""
        has_failed = self.watch is not None and self.watch.has_failed
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        if self._owns_group:
            atexit.unregister(self.close)
            if dist.is_initialized() and not (has_failed and dist.get_backend() == "nccl"):
                # After a failure NCCL would deadlock here; the group ends with the process instead.
                if self.world_size > 1:
                    time.sleep(_DRAIN_S)
                dist.destroy_process_group()
            # torch installs its own hook and does not remove it.
            if sys.excepthook is self._excepthooks[1]:
                sys.excepthook = self._excepthooks[0]
        if self._owns_accelerate_state:
            accelerate_state("PartialState").clear()
        self._owns_group = self._owns_accelerate_state = False
        super().close()

    def make_board(self) -> Board:
        if self.world_size == 1:
            return Board()
        if not self._has_store():
            raise StrategyError(
                f"Cannot exchange messages between {self.world_size} processes with strategy={self.name!r}.",
                "They share no store that a launcher made.",
                "Start with torchrun or `accelerate launch`, and use another backend than MPI.",
            )
        address = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
        # A separate connection: the group's blocking waits occupy theirs.
        store = _launchers_store(*address, self.rank, self.world_size, self.timeout).clone()  # type: ignore[attr-defined]
        return Board(PrefixStore(f"board/{next(_boards)}", store))

    def _check_same(self, model: nn.Module) -> None:
        """Raise unless all ranks have the same parameters and buffers, in the same order. Collective; synchronises.

        torch compares sizes only, and says the place of a parameter. Other differences end in a broken connection, an
        abort or a timeout, or mix up values without an error.
        """
        if self.world_size == 1:
            return
        file_tensors = stored_in(model)
        descriptions = [
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {() if is_lazy(tensor) else tuple(tensor.shape)}"
            + (" frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else "")
            + " in files" * (name in file_tensors)
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
        ]
        digest = int.from_bytes(hashlib.sha256("\n".join(descriptions).encode()).digest()[:7], "big")
        highest, lowest = self.reduce(torch.tensor([digest, -digest]), "max").tolist()
        if highest == -lowest:
            return
        ranks_by_line: dict[str, list[str]] = {}
        for lines in zip_longest(*self.gather_object(descriptions), fillvalue="no further parameter"):
            if len(set(lines)) > 1:
                for rank, line in enumerate(lines):
                    ranks_by_line.setdefault(line, []).append(str(rank))
                break
        differences = (
            f"{line} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:4])}{', ...' * (len(ranks) > 4)}"
            for line, ranks in ranks_by_line.items()
        )
        raise ConfigError(
            f"Cannot train {type(model).__name__} on {self.world_size} ranks: their models differ.",
            f"The first difference: {'; '.join(differences)}.",
            "Build the same model on every rank: from the same config, with the same number of labels and vocabulary.",
        )

    def _share_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers, which a checkpoint would hold. Collective; mutates the buffers."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def _has_store(self) -> bool:
        return self.world_size > 1 and "MASTER_ADDR" in os.environ and dist.get_backend() != "mpi"

    def _join(self) -> torch.device:
        """Return this process's device in a group that the caller created."""
        if dist.get_world_size() > 1:
            drain_at_exit()
        # Without a launcher's local rank, assume that all processes are on one machine.
        local_rank = read_launch().local_rank
        self.local_rank = dist.get_rank() if local_rank is None else local_rank
        return self._own_device()

    def _meet(self) -> torch.device:
        from accelerate import PartialState

        announce_launch()
        self._owns_accelerate_state = not accelerate_state("PartialState")
        # Without cpu=True, accelerate silently stays single-process on a machine without accelerators.
        state = PartialState(
            cpu=self.device_type == "cpu", backend=self.backend, timeout=self.timeout, **self._meeting_place()
        )
        num_processes, kind = state.num_processes, str(state.distributed_type)
        if num_processes != self.world_size:
            self.close()  # which empties accelerate's state
            raise StrategyError(
                f"strategy={self.name!r} was started as {self.world_size} processes.",
                f"accelerate set up {num_processes}, so each would train alone.",
                "Start with torchrun or `accelerate launch`, and make no Accelerator or PartialState before.",
                distributed_type=kind,
            )
        self.local_rank = state.local_process_index
        device: torch.device = state.device
        # accelerate takes the CPU for a kind of device that it does not know.
        return self._own_device() if device.type == "cpu" else device

    def _own_device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, self.local_rank % torch.accelerator.device_count())

    def _meeting_place(self) -> dict[str, Any]:
        """Return the group's own prefix of the launcher's store for exchanging addresses.

        A second group under the same prefix would find the first group's stale addresses; a rank that reads them
        before the others have written theirs would wait until the timeout.
        """
        if self.backend == "mpi" or not self._owns_accelerate_state:
            return {}
        address = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not address[0]:
            raise ConfigError(
                f"Cannot start strategy={self.name!r} as one of {self.world_size} processes:",
                "MASTER_ADDR is not set, so they cannot find each other.",
                "Start with torchrun, or set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port there "
                "(with Open MPI: mpirun -x MASTER_ADDR=HOST). To run as one process, unset WORLD_SIZE.",
            )
        if not (address[1].isdecimal() and 0 < int(address[1]) < 65536):
            raise ConfigError(
                f"Cannot use MASTER_PORT={address[1]!r}:",
                "it must be a port number from 1 to 65535.",
                "Start with torchrun, or set it to a free port of the host of rank 0, the same in all processes.",
            )
        store = _launchers_store(*address, self.rank, self.world_size, self.timeout)
        place = PrefixStore(f"meeting/{next(_meetings)}", store)
        return {"store": place, "rank": self.rank, "world_size": self.world_size}

    def _stay_alone(self) -> torch.device:
        get_logger(__name__).info(
            "strategy=%r runs as one process; start more with `torchrun --nproc_per_node=N script.py` or "
            "`accelerate launch --num_processes=N script.py`.",
            self.name,
        )
        dist.init_process_group(
            self.backend or "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=self.timeout,
        )
        return self.planned_device


@functools.cache
def spare_forked_processes() -> None:
    """Keep forked processes from garbage-collecting this process's objects.

    A destroyed group stays alive as long as a model's wrapper refers to it, and a launcher as long as its error does.
    Their threads do not exist in a forked process, such as a loader's worker, so collecting them there would hang or
    crash.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


@functools.cache
def drain_at_exit() -> None:
    """Let backend threads finish before the interpreter exits; a group that the caller created is not destroyed."""
    atexit.register(time.sleep, _DRAIN_S)


@functools.cache
def _launchers_store(address: str, port: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Connect to a launch's store once; rank 0 may serve it for all later groups. Collective."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:  # a name may appear late: a Kubernetes pod's, for one, when the pod is ready
        warn_once(
            f"MASTER_ADDR={address!r} cannot be resolved yet ({error.strerror}). Rank {rank} keeps trying for "
            f"{timeout.total_seconds():g} s (ddp_timeout). Correct MASTER_ADDR if the name is wrong."
        )
    try:
        store: Store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise StrategyError(
                f"Cannot listen on MASTER_PORT={port}:",
                "another process uses the port, perhaps an earlier run that has not ended.",
                "Set MASTER_PORT to a free port, or let torchrun choose one: torchrun --standalone.",
            ) from error
        reason = str(error).rstrip(".")
        raise StrategyError(
            f"Cannot start rank {rank} of {world_size}:",
            f"the ranks did not meet at {address}:{port} within {timeout.total_seconds():g} s ({reason}).",
            "Start all ranks, check that MASTER_ADDR and MASTER_PORT lead to rank 0 from every machine, or raise "
            "ddp_timeout.",
        ) from error
    return fresh_place(store, rank=rank, world_size=world_size, timeout=timeout)


def check_backend(backend: str, device_type: str) -> None:
    """Raise `ConfigError` if torch's backend cannot exchange tensors of a device type; creates no group."""
    serves = {name: dist.Backend.backend_capability.get(name, [device_type]) for name in dist.Backend.backend_list}
    usable = [
        name
        for name in dist.Backend.backend_list
        if name not in ("undefined", "fake") and dist.is_backend_available(name) and device_type in serves[name]
    ]
    if backend not in usable:
        raise ConfigError(
            f"Cannot use backend={backend!r}.",
            f"This torch cannot exchange {device_type} tensors through it.",
            f"Use one of {usable}.",
        )


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
