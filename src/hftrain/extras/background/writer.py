"""Copy the state, and write it in a thread while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hftrain.checkpoint.adapters import saves_adapters
from hftrain.checkpoint.policy import saves_at_all
from hftrain.checkpoint.state_files import Keep, capture_shards
from hftrain.checkpoint.writer import Captured, CheckpointWriter
from hftrain.core.log import get_logger
from hftrain.extras.background.background import BackgroundWrite
from hftrain.extras.background.snapshot import HostCopies
from hftrain.preemption.consensus import Consensus, Group
from hftrain.run.parts import RunParts
from hftrain.run.saving import capture_model
from hftrain.strategies.watch import is_peer_gone

logger = get_logger(__name__)

# A subclass that overrides one of these writes files itself, or expects them in the folder on return.
_WRITING_HOOKS = ("save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler")
_SHORT_WAIT_S = 0.1


class BackgroundWriter(CheckpointWriter):
    """Write one run's checkpoints in the background, from `start` on; at most one write is in flight."""

    def __init__(self, parts: RunParts) -> None:
        super().__init__(parts.manager, parts.save_policy, parts.best_checkpoint)
        self._parts = parts
        self._consensus: Consensus | None = None
        self._copies: HostCopies | None = None
        self._flight: BackgroundWrite | None = None
        self._has_waited = self._is_closed = False
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
        """Whether checkpoints are written in the background."""
        return self._copies is not None

    def keep(self, tree: Any) -> Any:
        """Return a nested structure, copied to host memory if it is written later."""
        return tree if self._copies is None else self._copies.copy(tree)

    def begin(self) -> None:
        """Prepare to copy the state for `write`."""
        if self._copies is not None:
            self._copies.begin()

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
                path = self.commit(captured, group)
                in_thread()
                return path
            finally:
                # In this order, the reverse of `__exit__`, so that one of the two releases the folder.
                self._is_written.set()
                if self._is_closed:
                    self.manager.lock.release()

        def conclude(path: Path | None, error: BaseException | None) -> None:
            self._flight = None
            self.conclude(captured, then, path, error)

        self._flight = BackgroundWrite(f"written {captured.step}", work, conclude, consensus=self._consensus)

    def finish(self, *, for_next: bool = False, name: str | None = None) -> None:
        """Wait for a background write, and raise its error; see `CheckpointWriter.finish`."""
        flight = self._flight
        if flight is None or name not in (None, flight.name):
            return
        start_s = time.perf_counter()
        flight.finish()
        waited_s = time.perf_counter() - start_s
        if for_next and waited_s > _SHORT_WAIT_S and not self._has_waited and self.manager.is_committer:
            self._has_waited = True
            logger.warning(
                "A save waited %.1f s for the one before it to be written: the disk is slower than the saves come. "
                "Save less often; this is said once.",
                waited_s,
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        flight, self._flight = self._flight, None
        # A program that must end at once does not wait: the pending write is lost.
        if flight is not None and not isinstance(error, KeyboardInterrupt):
            if self._consensus is not None and error is not None and is_peer_gone(error):
                self._consensus.expect_no_more()
            failure = flight.wait()
            if failure is not None:
                logger.error("The last checkpoint could not be written in the background: %s", failure)
        if self._copies is not None and (flight is None or flight.is_over):
            self._copies.close()
        if flight is not None:
            self.manager.lock.linger(flight.wait)
        self._consensus = self._copies = None
        self._is_closed = True
        if flight is None or self._is_written.is_set():
            self.manager.lock.release()

    def _reserve_later(self, copies: HostCopies) -> None:
        """Allocate memory for the copies as soon as all tensors exist."""
        parts = self._parts
        strategy, optimizer, manager = parts.strategy, parts.optimizer, self.manager

        def show(keep: Keep) -> None:
            capture_shards(strategy, parts.wrapped, None if manager.only_model else optimizer, keep)
            if strategy.shards_model:  # the rest must be gathered, which costs more than its memory
                return
            capture_model(parts, keep)
            if manager.is_committer and not manager.only_model:
                keep(strategy.optimizer_state(parts.wrapped, optimizer))

        def reserve() -> None:
            if getattr(optimizer, "state", True) or not parts.precision.state_dict():  # a loss scale skips steps
                parts.pending.remove(reserve)
                copies.reserve(show)

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
