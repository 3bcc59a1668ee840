"""`SavePolicy(save_async=True)`: copy the state to host memory, and write it while training continues."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.state_files import Keep, capture_shards
from hftrain.checkpoint.weights import saves_adapters
from hftrain.checkpoint.writer import Captured, CheckpointWriter, saves_at_all
from hftrain.core.devices import has_own_queue
from hftrain.core.errors import CheckpointError, explain
from hftrain.core.log import get_logger
from hftrain.core.tree import map_tensors
from hftrain.preemption.consensus import Consensus, Group
from hftrain.run.parts import RunParts
from hftrain.run.saving import capture_training_model
from hftrain.storage.tensors import tensor_identity
from hftrain.strategies.watch import is_peer_gone

logger = get_logger(__name__)

# A subclass that overrides one of these writes files itself, or expects them in the folder on return.
_WRITING_HOOKS = ("save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler")
_SHORT_WAIT_S = 0.1
# Below this, the caching allocator's rounding costs little; above, memory is registered directly.
_SMALL_BYTES = 1 << 20
_FAILED_ELSEWHERE = explain(
    "Cannot write a checkpoint in the background.",
    "Another process failed after its commit; see its error.",
    "Fix the cause, then resume from the newest checkpoint.",
)


class BackgroundWriter(CheckpointWriter):
    """Write one run's checkpoints in the background, from `start` on; at most one write is in flight."""

    def __init__(self, parts: RunParts) -> None:
        super().__init__(parts.manager, parts.save_policy, parts.best_checkpoint)
        self._parts = parts
        self._consensus: Consensus | None = None
        self._copies: HostCopies | None = None
        self._pending_write: BackgroundWrite | None = None
        self._has_warned = self._is_closed = False
        self._is_written = threading.Event()

    def start(self, *, consensus: Consensus | None, silence: str) -> None:
        """Write in the background from now on, or warn why that is not possible.

        Memory for the copies is allocated once the optimizer has stepped.
        """
        parts = self._parts
        reason = _obstacle(parts) or (silence if consensus is None else None)
        if reason is not None and self.manager.is_committer:
            logger.warning("save_async=True changes nothing, every save waits until it is written: %s", reason)
        if reason is None:
            self._consensus, self._copies = consensus, HostCopies()
            if saves_at_all(parts.args, parts.save_policy):
                self._reserve_later(self._copies)

    @property
    def is_async(self) -> bool:
        return self._copies is not None

    def keep(self, tree: Any) -> Any:
        return tree if self._copies is None else self._copies.copy(tree)

    def write(
        self,
        captured: Captured,
        then: Callable[[Path | None], None],
        *,
        in_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint; collective. See `CheckpointWriter.write`; an error is raised at a later step."""
        if self._copies is None or self._consensus is None:
            super().write(captured, then)
            return
        wait = self._copies.fence()
        self._is_written.clear()

        def work(group: Group) -> Path:
            try:
                wait()
                path = self.write_files(captured, group)
                in_thread()
                return path
            finally:
                # In this order, the reverse of `__exit__`, so that one of the two releases the folder.
                self._is_written.set()
                if self._is_closed:
                    self.manager.lock.release()

        def conclude(path: Path | None, error: BaseException | None) -> None:
            self._pending_write = None
            self.conclude(captured, then, path, error)

        self._pending_write = BackgroundWrite(f"written {captured.step}", work, conclude, consensus=self._consensus)

    def finish(self, *, for_next: bool = False, name: str | None = None) -> None:
        write, start_s = self._pending_write, time.perf_counter()
        if write is not None and name in (None, write.name):
            write.finish()
            is_long = time.perf_counter() - start_s > _SHORT_WAIT_S
            if for_next and is_long and not self._has_warned and self.manager.is_committer:
                self._has_warned = True
                logger.warning(
                    "A save waited %.1f s for the one before it to be written: the disk is slower than the saves come. "
                    "Save less often; this is said once.",
                    time.perf_counter() - start_s,
                )
        if for_next and self._copies is not None:
            self._copies.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        write, self._pending_write = self._pending_write, None
        # A program that must end at once does not wait: the pending write is lost.
        if write is not None and not isinstance(error, KeyboardInterrupt):
            if self._consensus is not None and error is not None and is_peer_gone(error):
                self._consensus.expect_no_more()
            failure = write.wait()
            if failure is not None:
                logger.error("The last checkpoint could not be written in the background: %s", failure)
        if self._copies is not None and (write is None or write.is_over):
            self._copies.close()
        if write is not None:
            self.manager.lock.linger(write.wait)
        self._consensus = self._copies = None
        self._is_closed = True
        if write is None or self._is_written.is_set():
            self.manager.lock.release()

    def _reserve_later(self, copies: HostCopies) -> None:
        parts = self._parts
        strategy, optimizer, manager = parts.strategy, parts.optimizer, self.manager

        def capture_all(keep: Keep) -> None:
            capture_shards(strategy, parts.wrapped, None if manager.only_model else optimizer, keep)
            if strategy.shards_model:  # the rest must be gathered, which costs more than its memory
                return
            capture_training_model(parts, keep)
            if manager.is_committer and not manager.only_model:
                keep(strategy.optimizer_state(parts.wrapped, optimizer))

        def reserve() -> None:
            if getattr(optimizer, "state", True) or not parts.precision.state_dict():  # a loss scale skips steps
                parts.pending.remove(reserve)
                copies.reserve(capture_all)

        parts.pending.append(reserve)


def _obstacle(parts: RunParts) -> str | None:
    """Return why nothing can be written in the background, None if it can."""
    trainer, strategy, model = parts.trainer, parts.strategy, parts.model
    for hook in _WRITING_HOOKS:
        if parts.hooks.is_overridden(hook):
            return f"{type(trainer).__name__}.{hook} writes, or reads, the files itself."
    if not strategy.saves_in_background:
        return f"strategy={strategy.name!r} has parts of its state written by another library."
    if getattr(model, "hf_quantizer", None) is not None and not saves_adapters(model):
        return "The weights of a quantized model are only available while it is saved."
    return None


class BackgroundWrite:
    """Run a piece of work in a separate thread, together with the same work on the other processes.

    Each process learns of the end at a different moment. If one raised at once, the others would wait for it in the
    next step's collective. So each process requests a step boundary, by the name of this write, at which all act.

    Args:
        name: What `Consensus.due` returns at the boundary at which all call `finish`; unique to this write.
        work: Called in the thread, with a group through which the processes agree.
        then: Called in the main thread with what the work returned, or its error; may raise.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Group], Path],
        then: Callable[[Path | None, BaseException | None], None],
        *,
        consensus: Consensus,
    ) -> None:
        self.name = name
        self._work, self._on_end, self._consensus = work, then, consensus
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        # A daemon, so that an interrupted process can exit without it.
        self._thread = threading.Thread(target=self._run, name="hftrain-save", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._is_over.is_set()

    def wait(self) -> BaseException | None:
        """Wait until the work has ended on all processes, and return its error without settling it."""
        # Not `join`: before Python 3.13, a thread counts as ended once its join was interrupted.
        self._is_over.wait()
        return self._error

    def finish(self) -> None:
        """Wait, and call `then`. All processes must call it at the same step, once."""
        self.wait()
        self._consensus.withdraw(self.name)
        self._on_end(self._path, self._error)

    def _run(self) -> None:
        try:
            self._path = self._work(self._consensus)
        except BaseException as error:  # of any kind, because the main thread raises it
            self._error = error
        try:
            if not self._consensus.all_true(self._error is None) and self._error is None:
                self._error = CheckpointError(_FAILED_ELSEWHERE)
        except BaseException as error:
            self._error = self._error or error
        self._consensus.ask(self.name)
        self._is_over.set()


class HostCopies:
    """Copy tensors to host memory, reusing the same memory each time.

    Copies stay valid until the next `begin`. Memory that a save did not reuse is released.
    """

    def __init__(self) -> None:
        self._free_buffers: dict[Any, list[torch.Tensor]] = {}
        self._used_buffers: list[tuple[Any, torch.Tensor]] = []
        self._registered: set[int] = set()
        self._devices: set[torch.device] = set()
        self._reserve_thread: threading.Thread | None = None
        self._is_cancelled = threading.Event()

    def reserve(self, capture: Callable[[Callable[[Any], Any]], Any]) -> None:
        """Allocate the memory of the first copies in a thread, so that they need not wait for it; at most once.

        Args:
            capture: Calls its argument with each nested structure that will be copied.
        """
        if self._used_buffers:
            return
        templates: dict[Any, torch.Tensor] = {}

        def note(tree: Any) -> Any:
            map_tensors(tree, lambda tensor: templates.setdefault(tensor_identity(tensor), tensor.detach()))
            return tree

        capture(note)
        templates.pop(None, None)  # not plain memory
        self._reserve_thread = threading.Thread(
            target=self._reserve, args=(list(templates.values()),), name="hftrain-reserve", daemon=True
        )
        self._reserve_thread.start()

    def begin(self) -> None:
        """Make all memory available for new copies."""
        if self._reserve_thread is not None:
            self._is_cancelled.set()
            self._reserve_thread.join()
            self._reserve_thread = None
        for key, buffer in self._used_buffers:
            self._free_buffers.setdefault(key, []).append(buffer)
        self._used_buffers, self._devices = [], set()

    def copy(self, tree: Any) -> Any:
        """Return a nested structure with its tensors copied; shared tensors stay shared.

        Copies from a device may not be complete on return, see `fence`.
        """
        copies: dict[Any, torch.Tensor] = {}

        def copy_once(tensor: torch.Tensor) -> torch.Tensor:
            identity = tensor_identity(tensor)
            if identity is None:  # not plain memory
                return tensor.detach().to("cpu", copy=True)
            if identity not in copies:
                copies[identity] = self._copy(tensor.detach())
            return copies[identity]

        return map_tensors(tree, copy_once)

    def fence(self) -> Callable[[], None]:
        """End the copying; return a function that waits, in any thread, until it is complete. Does not synchronise."""
        for buffers in self._free_buffers.values():
            for buffer in buffers:
                self._unregister(buffer)
        self._free_buffers.clear()
        events = []
        for device in self._devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def close(self) -> None:
        """Release all memory, once the copies are not read any more."""
        self.begin()
        self.fence()

    def _reserve(self, templates: Sequence[torch.Tensor]) -> None:
        try:
            for template in templates:
                if self._is_cancelled.is_set():  # missing memory is allocated by the copy
                    return
                key = _buffer_key(template)
                with torch.accelerator.device_index(template.device.index):  # a thread starts on the first device
                    buffer = self._allocate(template, is_pinned=key[-1])
                # Touch the pages now, which takes longer than the copy. Not with torch, which would use as many threads
                # as the training next to it.
                ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)
                self._free_buffers.setdefault(key, []).append(buffer)
        except (RuntimeError, MemoryError) as error:
            logger.warning("The first save takes longer: its memory cannot be had beforehand (%s).", error)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _buffer_key(tensor)
        is_pinned = key[-1]
        buffers = self._free_buffers.get(key)
        buffer = buffers.pop() if buffers else self._allocate(tensor, is_pinned=is_pinned)
        self._used_buffers.append((key, buffer))
        if is_pinned:
            # In stream order: a later update of the tensor waits for the copy, and the host does not.
            self._devices.add(tensor.device)
        return buffer.copy_(tensor, non_blocking=is_pinned)

    def _allocate(self, template: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
        num_bytes = template.numel() * template.element_size()
        registers = is_pinned and num_bytes >= _SMALL_BYTES and template.device.type == "cuda"
        buffer = torch.empty_like(template, device="cpu", pin_memory=is_pinned and not registers)
        if registers:
            # torch allocates pinned memory in powers of two: up to twice the state.
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
            if int(status) == 0:
                self._registered.add(buffer.data_ptr())
        return buffer

    def _unregister(self, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() in self._registered:
            self._registered.discard(buffer.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]


def _buffer_key(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, bool]:
    """Return a key that is equal for tensors that can be copied to the same memory."""
    return tensor.shape, tensor.stride(), tensor.dtype, has_own_queue(tensor.device.type)
