"""Write the checkpoints of a run as its `SavePolicy` says: now or in the background, also if the disk is full."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrain.checkpoint.background import BackgroundWrite
from hftrain.checkpoint.manager import CheckpointManager, NoSpaceError
from hftrain.checkpoint.policy import SavePolicy
from hftrain.checkpoint.snapshot import HostCopies
from hftrain.checkpoint.state_files import Writer
from hftrain.core.log import get_logger
from hftrain.preemption.consensus import Consensus, Group
from hftrain.storage.space import free_bytes, readable_bytes
from hftrain.strategies.watch import is_peer_gone

logger = get_logger(__name__)

_SHORT_WAIT_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The state of a step, captured to be written.

    Args:
        num_bytes: Its approximate size on disk.
        writers, facts: See `CheckpointManager.save`.
    """

    step: int
    epoch: float | None
    num_bytes: int
    writers: Sequence[Writer]
    facts: Mapping[str, Any]


class CheckpointWriter:
    """Write one run's checkpoints through its manager.

    Args:
        find_best: Returns the folder of the best model so far, which is never deleted.

    Attributes:
        skipped_steps: The steps whose checkpoints did not fit on the disk.
    """

    def __init__(self, manager: CheckpointManager, policy: SavePolicy, find_best: Callable[[], Path | None]) -> None:
        self.manager, self._policy, self._find_best = manager, policy, find_best
        self._consensus: Consensus | None = None
        self._copies: HostCopies | None = None
        self._flight: BackgroundWrite | None = None
        self._has_waited = self._is_closed = False
        self._is_written = threading.Event()
        self.skipped_steps: list[int] = []

    def __enter__(self) -> CheckpointWriter:
        return self

    def use_background(self, consensus: Consensus) -> HostCopies:
        """Write in the background from now on; return the memory into which the state is copied."""
        self._consensus, self._copies = consensus, HostCopies()
        return self._copies

    @property
    def is_async(self) -> bool:
        """Whether checkpoints are written in the background."""
        return self._copies is not None

    def keep(self, tree: Any) -> Any:
        """Return a nested structure, copied to host memory if it is written later."""
        return tree if self._copies is None else self._copies.copy(tree)

    def make_room(self, num_bytes: int, *, step: int) -> bool:
        """Return whether a checkpoint fits on disk. Collective. Frees space first if the policy allows it.

        Raises:
            NoSpaceError: It does not fit, and the policy is to stop.
        """
        policy, manager = self._policy.on_full_disk, self.manager
        free = free_bytes(manager.output_dir) if manager.is_committer else num_bytes
        if free < num_bytes and policy == "prune" and manager.prune(num_bytes, best=self._find_best()):
            free = free_bytes(manager.output_dir)
        if manager.group.all_true(free >= num_bytes):
            return True
        reason = (
            f"It takes about {readable_bytes(num_bytes)}, and {readable_bytes(free)} are free."
            if free < num_bytes
            else "Another machine has no space for it."
        )
        asked = f"Cannot write the checkpoint of step {step} to {manager.output_dir}."
        error = NoSpaceError(asked, reason, "Free some space, then resume from the newest checkpoint.")
        if policy == "stop":
            raise error
        self._skip(step, error)
        return False

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
        """Write a checkpoint, now or in the background; collective.

        Args:
            then: Called with the folder once it is committed, in the main thread and at the same step on all processes;
                or with None if there was no space and the run continues.
            in_thread: Called after a commit in the background, in its thread.

        Raises:
            CheckpointError: It could not be written; for a background write, raised at a later step.
        """

        def conclude(path: Path | None, error: BaseException | None) -> None:
            self._flight = None
            if isinstance(error, NoSpaceError) and self._policy.on_full_disk != "stop":
                self._skip(captured.step, error)
            elif error is not None:
                raise error
            then(path)

        if self._copies is None or self._consensus is None:
            try:
                path = self._commit(captured, self.manager.group)
            except NoSpaceError as error:
                conclude(None, error)
            else:
                conclude(path, None)
            return
        wait = self._copies.fence()
        self._is_written.clear()

        def work(group: Group) -> Path:
            try:
                wait()
                path = self._commit(captured, group)
                in_thread()
                return path
            finally:
                # In this order, the reverse of `__exit__`, so that one of the two releases the folder.
                self._is_written.set()
                if self._is_closed:
                    self.manager.lock.release()

        self._flight = BackgroundWrite(f"written {captured.step}", work, conclude, consensus=self._consensus)

    def finish(self, *, for_next: bool = False, name: str | None = None) -> None:
        """Wait for a background write, and raise its error. All processes must call it at the same step.

        Args:
            for_next: Whether the next save waits; a long wait is logged once.
            name: What `Consensus.due` returned, if only the write that has asked for it is to be finished.
        """
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

    def _commit(self, captured: Captured, group: Group) -> Path:
        while True:
            try:
                return self.manager.save(captured.step, captured.writers, facts=captured.facts, group=group)
            except NoSpaceError:
                is_pruning, best = self._policy.on_full_disk == "prune", self._find_best()
                # Each iteration deletes at least one, so this ends.
                if not is_pruning or group.all_true(not self.manager.prune(captured.num_bytes, best=best)):
                    raise

    def _skip(self, step: int, error: BaseException) -> None:
        self.skipped_steps.append(step)
        if self.manager.is_committer:
            own = self.manager.own_checkpoints()
            logger.warning(
                "Skipped the checkpoint of step %d and train on; %s. %s The next save tries again; "
                "SavePolicy(on_full_disk=...) can free space by deleting older checkpoints, or stop the run.",
                step,
                f"the last one is {own[-1].name}" if own else "there is none yet",
                error,
            )
