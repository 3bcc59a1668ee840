"""Several processes that meet in a torch process group: how they meet, and what they tell each other."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hftrain.core.accelerate_state import accelerate_state
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.launcher import announce_launch, read_launch
from hftrain.core.log import get_logger, warn_once
from hftrain.strategies import collectives
from hftrain.strategies.base import Strategy
from hftrain.strategies.board import Board
from hftrain.strategies.environment import find_device_type
from hftrain.strategies.links import link_timeout_s
from hftrain.strategies.rendezvous import fresh_place
from hftrain.strategies.watch import RankWatch

# A thread of the backend may still hold tensors of the last exchange, and needs the interpreter to let them go: at exit
# it would find it gone, and abort the process after a good run.
_DRAIN_S = 0.1
_meetings = itertools.count()
_boards = itertools.count()
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl"}


class DistributedStrategy(Strategy):
    """Join the processes that a launcher started, or be a group of one.

    Args:
        use_cpu: Stay on the CPU although there are accelerators.
        backend: The documented `ddp_backend` (``"nccl"``, ``"gloo"``, ...); by default the one for the device.
        timeout_s: The documented `ddp_timeout`: how long a process waits for the others.
        place_model: Whether `setup` moves the model; False for a model that is already spread or quantized.

    Units:
        timeout_s: seconds.

    Raises:
        ConfigError: This torch has no such backend, or the backend cannot serve the device.
    """

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
        self.backend = backend or _BACKENDS.get(self.device_type)
        self.timeout = timedelta(seconds=timeout_s)
        self._link_timeout_s = link_timeout_s()
        self._owns_group = False
        self._owns_accelerate_state = False
        self._excepthooks = (sys.excepthook, sys.excepthook)
        if self.backend is not None:
            check_backend(self.backend, self.device_type)

    def launch(self) -> None:
        """Meet the other processes and take the device; doing so again changes nothing. Collective.

        Uses the process group that exists, else the one the launcher describes, else a group of one process.

        Raises:
            ConfigError: See `check_processes`.
            StrategyError: Fewer processes met than the launcher announced.
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
            # Processes of one machine have no network between them that could break.
            timeout_s = 0.0 if read_launch().local_world_size == self.world_size else self._link_timeout_s
            board = self.make_board()
            self.watch = RankWatch(board, rank=self.rank, world_size=self.world_size, link_timeout_s=timeout_s)
        self._take(device)

    def close(self) -> None:
        """Leave the process group, if `launch` made it; safe to call twice. Collective, except after an error."""
        has_failed = self.watch is not None and self.watch.has_failed
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        if self._owns_group:
            atexit.unregister(self.close)
            if dist.is_initialized() and not (has_failed and dist.get_backend() == "nccl"):
                # NCCL would wait for the others, who wait for this process: it ends with the process.
                if self.world_size > 1:
                    time.sleep(_DRAIN_S)
                dist.destroy_process_group()
            # torch put its own hook in, and leaves it there.
            if sys.excepthook is self._excepthooks[1]:
                sys.excepthook = self._excepthooks[0]
        if self._owns_accelerate_state:
            accelerate_state("PartialState").clear()
        self._owns_group = self._owns_accelerate_state = False
        super().close()

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor if self.world_size == 1 else collectives.reduce(tensor, op=op, device=self.device)

    def reduce_later(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
        return super().reduce_later(tensor) if self.world_size == 1 else collectives.sum_later(tensor, self._device)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = super().gather(tensor)
        return tensor if self.world_size == 1 else collectives.gather(tensor, device=self.device)

    def gather_object(self, obj: Any) -> list[Any]:
        return [obj] if self.world_size == 1 else collectives.gather_object(obj, device=self.device)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj if self.world_size == 1 else collectives.broadcast_object(obj, src=src, device=self.device)

    def barrier(self) -> None:
        if self.world_size > 1:
            # Without device_ids NCCL guesses the device, and warns.
            dist.barrier(device_ids=[self.device.index] if dist.get_backend() == "nccl" else None)

    def all_true(self, flag: bool) -> bool:
        return flag if self.world_size == 1 else not self.reduce(torch.tensor(int(not flag)), "max").item()

    def make_board(self) -> Board:
        if self.world_size == 1:
            return Board()
        if not self._has_store():
            raise StrategyError(
                f"strategy={self.name!r} should pass notes among {self.world_size} processes.",
                "They share no store that a launcher made.",
                "Start with torchrun or `accelerate launch`, and use another backend than MPI.",
            )
        address = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
        # A connection of its own: the group's waits hold theirs.
        store = _launchers_store(*address, self.rank, self.world_size, self.timeout).clone()  # type: ignore[attr-defined]
        return Board(PrefixStore(f"board/{next(_boards)}", store))

    def _share_buffers(self, model: nn.Module) -> None:
        """Send rank 0's buffers, those that it would save, to every process. Collective; mutates the buffers."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def _has_store(self) -> bool:
        return self.world_size > 1 and "MASTER_ADDR" in os.environ and dist.get_backend() != "mpi"

    def _join(self) -> torch.device:
        """Find the device of this process in a group that somebody else made."""
        if dist.get_world_size() > 1:
            drain_at_exit()
        # Without a launcher's word, take the processes to be on one machine.
        local_rank = read_launch().local_rank
        self.local_rank = dist.get_rank() if local_rank is None else local_rank
        if self.device_type == "cpu":
            return self.planned_device
        return torch.device(self.device_type, self.local_rank % getattr(torch, self.device_type).device_count())

    def _meet(self) -> torch.device:
        """Form the group that the launcher describes."""
        from accelerate import PartialState

        announce_launch()
        self._owns_accelerate_state = not accelerate_state("PartialState")
        # Without cpu=True accelerate stays single on a machine without accelerators, and says nothing.
        state = PartialState(
            cpu=self.device_type == "cpu", backend=self.backend, timeout=self.timeout, **self._meeting_place()
        )
        if state.num_processes != self.world_size:
            self.close()
            raise StrategyError(
                f"strategy={self.name!r} was started as {self.world_size} processes.",
                f"accelerate set up {state.num_processes}, so each would train alone.",
                "Start with torchrun or `accelerate launch`, and make no Accelerator or PartialState before.",
                distributed_type=str(state.distributed_type),
            )
        self.local_rank = state.local_process_index
        device: torch.device = state.device
        return torch.device("cpu") if device.type == "cpu" else device

    def _meeting_place(self) -> dict[str, Any]:
        """Return where in the launcher's store the processes leave their addresses, each time somewhere else.

        A second group at the place of the first finds the addresses of the first, which nobody answers any more; a
        rank that looks before the others have written theirs then waits until the timeout.
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
        """Form a group of one."""
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
    """Let no process that is forked from this one collect what was garbage here.

    A group that was left lives on for as long as a model's wrapper does, and what started processes before for as long
    as the error that it ended with. Its threads are not in a forked process, such as a loader's worker, whose collector
    would wait for them in vain or crash.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


@functools.cache
def drain_at_exit() -> None:
    """Let the backend's threads finish before the interpreter goes: nobody may leave the group that somebody made."""
    atexit.register(time.sleep, _DRAIN_S)


@functools.cache
def _launchers_store(address: str, port: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Connect to the store of one launch, once: rank 0 may be the one who serves it, for all the groups to come.

    Collective.
    """
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
    """Raise unless torch can exchange tensors of a kind of device through a backend; no group is made.

    Raises:
        ConfigError: This torch has no such backend, or it does not serve the device.
    """
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
            backend=backend,
        )
