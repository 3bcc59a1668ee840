"""When a run saves and what a full disk means to it (`SavePolicy`), and the writer that does both."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.manager import CheckpointManager, NoSpaceError
from hftrain.checkpoint.state_files import Writer
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.preemption.consensus import Consensus, Group
from hftrain.storage.files import WRITE_TEST, appears, free_bytes, readable_bytes
from hftrain.strategies.base import Strategy

OnFullDisk = Literal["warn", "prune", "stop"]
OnNonfinite = Literal["warn", "stop", "restore"]

_CHOICES = {"on_full_disk": get_args(OnFullDisk), "on_nonfinite": get_args(OnNonfinite)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePolicy:
    """When and how a run saves, beyond `save_strategy` and related arguments.

    Args:
        save_async: Whether a save copies the state to host memory and writes it in the background while training
            continues. At most one write is in flight; its error is raised at a later step.
        on_signal: Whether SIGTERM and SIGINT end the run at the next step boundary with a checkpoint, and SIGUSR1 saves
            one and continues. Handlers that the program has set stay in place.
        grace_s: How long a run may make no progress after SIGTERM. Then, or at a second SIGTERM, `TrainingStopped`
            interrupts the step, and 5 s later the process exits. None waits forever. With the default, a run that
            hangs ends after 25 s; SLURM, Kubernetes and torchrun kill after 30 s. The time restarts whenever a batch
            is done or a checkpoint grows, and is at least 1.5 times the longest pause of the run so far.
        on_exception: Whether an error in training saves a checkpoint of the last complete step; only with one process.
            Each step then starts by copying what it changes before it updates the weights.
        every_s: Also save when this much time has passed since the last checkpoint.
        keep_best: How many checkpoints with the best metrics to keep, in addition to the newest; needs
            `metric_for_best_model`. Without `save_total_limit` no others are kept. None keeps the best one, as
            documented.
        on_full_disk: What to do if there is no space for a checkpoint: ``"warn"`` and continue without it, ``"prune"``
            older ones first, or ``"stop"`` the run with an error.
        on_nonfinite: What to do if, at a save, weights are NaN or infinite, or a loss since the last save was:
            ``"warn"``, save, and also keep the last finite checkpoint; ``"stop"`` the run with an error and save
            nothing; or ``"restore"`` weights and optimizer from the last finite checkpoint, and continue with the next
            batches.

    Units:
        every_s, grace_s: seconds.

    Raises:
        ConfigError: A value is not allowed.
    """

    save_async: bool = False
    on_signal: bool = True
    grace_s: float | None = 20.0
    on_exception: bool = False
    every_s: float | None = None
    keep_best: int | None = None
    on_full_disk: OnFullDisk = "warn"
    on_nonfinite: OnNonfinite = "warn"

    def __post_init__(self) -> None:
        is_wrong = {
            "every_s": self.every_s is not None and not (_is_number(self.every_s) and self.every_s > 0),
            "grace_s": self.grace_s is not None and not (_is_number(self.grace_s) and self.grace_s > 0),
            "keep_best": self.keep_best is not None and not (_is_number(self.keep_best, int) and self.keep_best > 0),
            **{name: getattr(self, name) not in choices for name, choices in _CHOICES.items()},
        }
        for name in (name for name, flag in is_wrong.items() if flag):
            raise ConfigError(
                f"Cannot use SavePolicy({name}={getattr(self, name)!r}).",
                "It has no such meaning.",
                f"Use one of {', '.join(_CHOICES[name])}."
                if name in _CHOICES
                else f"Give {name} a number above 0, or leave it out.",
            )


def saves_at_all(args: TrainingArguments, policy: SavePolicy) -> bool:
    """Tell whether a run writes checkpoints at any time."""
    return args.save_strategy != "no" or policy.every_s is not None or policy.on_exception


def _is_number(value: object, kind: type[Real] | type[int] = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


logger = get_logger(__name__)


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
        self.skipped_steps: list[int] = []

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.manager.lock.release()

    def start(self, *, consensus: Consensus | None, silence: str) -> None:
        """Prepare to write; one that writes in the background does so from now on.

        Args:
            consensus: How the processes agree on the end of a background write; None if they cannot.
            silence: The reason if there is none.
        """

    @property
    def is_async(self) -> bool:
        """Whether checkpoints are written in the background."""
        return False

    def keep(self, tree: Any) -> Any:
        """Return a nested structure, copied to host memory if it is written later."""
        return tree

    def check_room(self, num_bytes: int) -> None:
        """Raise `ConfigError` if no checkpoint of this size fits. Collective.

        A resumed run that already has a checkpoint may continue, unless its policy is to stop when the disk is full.
        """
        manager, is_enough, free = self.manager, True, 0
        if manager.is_committer:
            free = free_bytes(manager.output_dir)
            logger.info("A checkpoint takes about %s; %s are free.", readable_bytes(num_bytes), readable_bytes(free))
            may_wait = self._policy.on_full_disk != "stop"
            is_enough = free >= num_bytes or (may_wait and bool(manager.own_checkpoints()))
        if not manager.group.all_true(is_enough):
            reason = f"{readable_bytes(free)} are free there" if manager.is_committer else "there is less room"
            raise ConfigError(
                f"Cannot save checkpoints to {manager.output_dir}.",
                f"One takes about {readable_bytes(num_bytes)}, and {reason}.",
                "Give an output_dir with more room, or save less: save_only_model=True, or save_strategy='no'.",
            )

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
        problem = f"Cannot write the checkpoint of step {step} to {manager.output_dir}."
        error = NoSpaceError(problem, reason, "Free some space, then resume from the newest checkpoint.")
        if policy == "stop":
            raise error
        self._skip(step, error)
        return False

    def write(
        self,
        captured: Captured,
        then: Callable[[Path | None], None],
        *,
        in_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint; collective.

        Args:
            then: Called with the folder once it is committed, in the main thread and at the same step on all processes;
                or with None if there was no space and the run continues.
            in_thread: Called after a commit in the background, in its thread.

        Raises:
            CheckpointError: It could not be written.
        """
        path, error = None, None
        try:
            path = self.write_files(captured, self.manager.group)
        except NoSpaceError as caught:
            error = caught
        self.conclude(captured, then, path, error)

    def conclude(
        self, captured: Captured, then: Callable[[Path | None], None], path: Path | None, error: BaseException | None
    ) -> None:
        """Call `then` with the folder, or raise the error of `write_files` unless the run continues without one."""
        if isinstance(error, NoSpaceError) and self._policy.on_full_disk != "stop":
            self._skip(captured.step, error)
        elif error is not None:
            raise error
        then(path)

    def finish(self, *, for_next: bool = False, name: str | None = None) -> None:
        """Wait for a background write, and raise its error. All processes must call it at the same step.

        Args:
            for_next: Whether the next save waits, which then captures its state; a long wait is logged once.
            name: What `Consensus.due` returned, if only the write that has asked for it is to be finished.
        """

    def write_files(self, captured: Captured, group: Group) -> Path:
        """Write and commit a checkpoint, and delete older ones if the disk is full and the policy allows it."""
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
            checkpoints = self.manager.own_checkpoints()
            logger.warning(
                "Skipped the checkpoint of step %d and train on; %s. %s The next save tries again; "
                "SavePolicy(on_full_disk=...) can free space by deleting older checkpoints, or stop the run.",
                step,
                f"the last one is {checkpoints[-1].name}" if checkpoints else "there is none yet",
                error,
            )


def check_shared_folder(folder: Path, strategy: Strategy, *, on_each_node: bool) -> None:
    """Raise if machines do not share an output folder that they should share, or the reverse. Collective.

    The first process of each machine writes a file there and looks for the files of the others.

    Raises:
        ConfigError: Raised on all processes; it names two machines and their folders.
    """
    probe = folder / f"{WRITE_TEST}{secrets.token_hex(8)}" if strategy.is_local_main else None
    host = socket.gethostname()
    try:
        problem = _write(probe, host)
        notes = strategy.gather_object((host, str(folder), probe and probe.name, problem))
        probes = [(other, Path(path), name) for other, path, name, _ in notes if name is not None]
        problems = [note[3] for note in notes]
        if len(probes) > 1 and not any(problems):
            problems = strategy.gather_object(probe and _compare(probe, host, probes, on_each_node=on_each_node))
    finally:
        if probe is not None:
            with suppress(OSError):
                probe.unlink()
    for reason, remedy in filter(None, problems):
        raise ConfigError(f"Cannot save checkpoints to {folder}.", reason, remedy)


def _write(probe: Path | None, host: str) -> tuple[str, str] | None:
    """Write this machine's file; return the problem and what to do about it, None if there is none."""
    try:
        if probe is not None:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
    except OSError as error:
        return f"{host} cannot write there: {error}.", "Give a folder in which this user may create files."
    return None


def _compare(
    probe: Path, host: str, probes: list[tuple[str, Path, str]], *, on_each_node: bool
) -> tuple[str, str] | None:
    """Look for the other machines' files; return the problem and what to do about it, None if there is none."""
    for other, folder, name in probes if on_each_node else probes[:1]:
        is_other = name != probe.name
        if on_each_node and is_other and (probe.parent / name).exists():
            reason = f"{other} ({folder}) and {host} ({probe.parent}) write to the same storage."
            return reason, "On storage that machines share leave save_on_each_node out."
        if not on_each_node and is_other and not appears(probe.parent / name):
            reason = f"What {other} writes to {folder}, {host} does not find in {probe.parent}."
            return reason, "Give all machines one output_dir on storage that they share, or set save_on_each_node=True."
    return None
