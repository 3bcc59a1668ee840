"""Copies of a run's tensors in host memory, written while training continues."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hftrain.core.log import get_logger
from hftrain.core.tree import map_tensors
from hftrain.storage.tensors import tensor_identity

logger = get_logger(__name__)

# Below this, the caching allocator's rounding costs little; above, memory is registered directly.
_SMALL_BYTES = 1 << 20


class HostCopies:
    """Copy tensors to host memory, reusing the same memory each time.

    Copies stay valid until the next `begin`. Memory that a save did not reuse is released.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}
        self._used: list[tuple[Any, torch.Tensor]] = []
        self._registered: set[int] = set()
        self._devices: set[torch.device] = set()
        self._reserving: threading.Thread | None = None
        self._is_needed = threading.Event()

    def reserve(self, capture: Callable[[Callable[[Any], Any]], Any]) -> None:
        """Allocate the memory of the first copies in a thread, so that they need not wait for it; at most once.

        Args:
            capture: Calls its argument with each nested structure that will be copied.
        """
        if self._used:
            return
        likes: dict[Any, torch.Tensor] = {}

        def note(tree: Any) -> Any:
            map_tensors(tree, lambda tensor: likes.setdefault(tensor_identity(tensor), tensor.detach()))
            return tree

        capture(note)
        likes.pop(None, None)  # not plain memory
        self._reserving = threading.Thread(
            target=self._reserve, args=(list(likes.values()),), name="hftrain-reserve", daemon=True
        )
        self._reserving.start()

    def begin(self) -> None:
        """Make all memory available for new copies."""
        if self._reserving is not None:
            self._is_needed.set()
            self._reserving.join()
            self._reserving = None
        for key, room in self._used:
            self._free.setdefault(key, []).append(room)
        self._used, self._devices = [], set()

    def copy(self, tree: Any) -> Any:
        """Return a nested structure with its tensors copied; shared tensors stay shared.

        Copies from a CUDA device may not be complete on return, see `fence`.
        """
        known: dict[Any, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            identity = tensor_identity(tensor)
            if identity is None:  # not plain memory
                return tensor.detach().to("cpu", copy=True)
            if identity not in known:
                known[identity] = self._copy(tensor.detach())
            return known[identity]

        return map_tensors(tree, once)

    def fence(self) -> Callable[[], None]:
        """End the copying; return a function that waits, in any thread, until it is complete. Does not synchronise."""
        for rooms in self._free.values():
            for room in rooms:
                self._let_go(room)
        self._free.clear()
        events = []
        for device in self._devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def close(self) -> None:
        """Release all memory, once the copies are not read any more."""
        self.begin()
        self.fence()

    def _reserve(self, likes: Sequence[torch.Tensor]) -> None:
        try:
            for like in likes:
                if self._is_needed.is_set():  # missing memory is allocated by the copy
                    return
                key = _form(like)
                with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]  # a thread starts on the first device
                    room = self._make(like, is_pinned=key[-1])
                # Touch the pages now, which takes longer than the copy. Not with torch, which would use as many threads
                # as the training next to it.
                ctypes.memset(room.data_ptr(), 0, room.nbytes)
                self._free.setdefault(key, []).append(room)
        except (RuntimeError, MemoryError) as error:
            logger.warning("The first save takes longer: its memory cannot be had beforehand (%s).", error)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _form(tensor)
        is_cuda = key[-1]
        rooms = self._free.get(key)
        room = rooms.pop() if rooms else self._make(tensor, is_pinned=is_cuda)
        self._used.append((key, room))
        if is_cuda:
            # In stream order: a later update of the tensor waits for the copy, and the host does not.
            self._devices.add(tensor.device)
        return room.copy_(tensor, non_blocking=is_cuda)

    def _make(self, like: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
        num_bytes = like.numel() * like.element_size()
        is_small = num_bytes < _SMALL_BYTES
        room = torch.empty_like(like, device="cpu", pin_memory=is_pinned and is_small)
        if is_pinned and not is_small:
            # torch allocates pinned memory in powers of two: up to twice the state.
            status = torch.cuda.cudart().cudaHostRegister(room.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
            if int(status) == 0:
                self._registered.add(room.data_ptr())
        return room

    def _let_go(self, room: torch.Tensor) -> None:
        if room.data_ptr() in self._registered:
            self._registered.discard(room.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(room.data_ptr())  # type: ignore[no-untyped-call]


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, bool]:
    """Return a key that is equal for tensors that can be copied to the same memory."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type == "cuda"
