"""Write a run's checkpoints, synchronously or in the background, and handle a full disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.adapters import saves_adapters
from hftrain.checkpoint.background import BackgroundWrite
from hftrain.checkpoint.layout import ARGUMENTS
from hftrain.checkpoint.manager import CheckpointManager, NoSpaceError, Writer
from hftrain.checkpoint.policy import SavePolicy
from hftrain.checkpoint.remote import NodeUploads
from hftrain.checkpoint.shared_folder import check_shared_folder
from hftrain.checkpoint.snapshot import HostCopies
from hftrain.checkpoint.state_files import Keep, shard_writers
from hftrain.checkpoint.weights import save_task_state, save_weights, with_own_configs
from hftrain.core.log import get_logger
from hftrain.core.signatures import Hooks
from hftrain.core.state import TrainerState
from hftrain.preemption.consensus import Consensus, Group
from hftrain.rules.saving import watch_states
from hftrain.run.disk_space import check_room, checkpoint_bytes, expected_state_bytes
from hftrain.run.output import Output
from hftrain.run.parts import RunParts, TrainerHooks
from hftrain.storage.space import free_bytes, readable_bytes
from hftrain.storage.tensors import save_containers
from hftrain.task.module import task_state

logger = get_logger(__name__)

# A subclass that overrides one of these writes files itself, or expects them in the folder on return.
_WRITING_HOOKS = ("save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler")
_SHORT_WAIT_S = 0.1


def saves_at_all(args: TrainingArguments, policy: SavePolicy) -> bool:
    """Tell whether a run writes checkpoints at any time."""
    return args.save_strategy != "no" or policy.every_s is not None or policy.on_exception


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One checkpoint to write.

    Args:
        num_bytes: Its approximate size on disk.
        main, each, facts: See `CheckpointManager.save`.
    """

    step: int
    epoch: float | None
    num_bytes: int
    main: Sequence[Writer]
    each: Sequence[Writer]
    facts: Mapping[str, Any]


class CheckpointWrites:
    """Write one run's checkpoints as its `SavePolicy` says."""

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._policy, self.manager = parts, parts.save_policy, parts.manager
        self._consensus: Consensus | None = None
        self._copies: HostCopies | None = None
        self._flight: BackgroundWrite | None = None
        self._has_waited = self._is_closed = False
        self._is_written = threading.Event()
        # The steps whose checkpoints did not fit on the disk.
        self.skipped_steps: list[int] = []

    def __enter__(self) -> CheckpointWrites:
        return self

    def start(self, *, own: Callable[[], Any], consensus: Consensus | None, silence: str) -> None:
        """Raise if the run cannot save, and prepare background writes if the policy enables them.

        If that is not possible, a warning gives the reason. Memory for the copies is allocated once the optimizer has
        stepped. Collective.

        Args:
            own: Returns the state that each process saves for itself.
            consensus: How processes agree on background writes; None if there is none.
            silence: The reason if there is none.

        Raises:
            ConfigError: There is no space for a checkpoint, or a state that it cannot store.
        """
        parts, optimizer = self._parts, self._parts.optimizer
        saves = saves_at_all(parts.args, self._policy)
        if saves:
            manager = self.manager
            if manager.url is None:  # a mirror need not be shared
                check_shared_folder(manager.output_dir, parts.strategy, on_each_node=manager.on_each_node)
            check_room(parts)
            states = parts.args, parts.strategy, optimizer, self._parts.trainer.lr_scheduler, parts.loops
            watch_states(*states, own=own, pending=parts.pending, is_overridden=self._parts.hooks.is_overridden)
        if not self._policy.save_async:
            return
        reason = self._obstacle() or (silence if consensus is None else None)
        if reason is None:
            self._consensus, self._copies = consensus, HostCopies()
        if reason is not None and self.manager.is_committer:
            logger.warning("save_async=True changes nothing, every save waits until it is written: %s", reason)
        if self._copies is not None and saves:
            self._reserve_later(self._copies)

    @property
    def is_async(self) -> bool:
        """Whether checkpoints are written in the background."""
        return self._copies is not None

    def keep(self, tree: Any) -> Any:
        """Return a nested structure, copied to host memory if it is written later."""
        return tree if self._copies is None else self._copies.copy(tree)

    def make_room(self, *, step: int) -> int | None:
        """Return the approximate bytes of a checkpoint; None if it does not fit on disk. Collective.

        Frees space first if the policy allows it.

        Raises:
            NoSpaceError: It does not fit, and the policy is to stop.
        """
        num_bytes = checkpoint_bytes(self._parts)
        policy, manager = self._policy.on_full_disk, self.manager
        free = free_bytes(manager.output_dir) if manager.is_committer else num_bytes
        if free < num_bytes and policy == "prune" and manager.prune(num_bytes, best=self._parts.best_checkpoint()):
            free = free_bytes(manager.output_dir)
        if self._parts.strategy.all_true(free >= num_bytes):
            return num_bytes
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
        return None

    def begin(self) -> None:
        """Prepare to copy the state for `write`."""
        if self._copies is not None:
            self._copies.begin()

    def write(self, save: Save, then: Callable[[Save, Path | None], None]) -> None:
        """Write a checkpoint, now or in the background; collective.

        Args:
            then: Called with the folder once it is committed, in the main thread and at the same step on all processes;
                or with None if there was no space and the run continues.

        Raises:
            CheckpointError: It could not be written; for a background write, raised at a later step.
        """

        def conclude(path: Path | None, error: BaseException | None) -> None:
            self._flight = None
            if isinstance(error, NoSpaceError) and self._policy.on_full_disk != "stop":
                self._skip(save.step, error)
            elif error is not None:
                raise error
            then(save, path)

        if self._copies is None or self._consensus is None:
            try:
                path = self._commit(save, self.manager.group)
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
                path = self._commit(save, group)
                if not self.rotates_later:
                    self.manager.rotate(best=self._parts.best_checkpoint())
                self._parts.output.publish_quietly()
                return path
            finally:
                # In this order, the reverse of `__exit__`, so that one of the two releases the folder.
                self._is_written.set()
                if self._is_closed:
                    self.manager.lock.release()

        self._flight = BackgroundWrite(f"written {save.step}", work, conclude, consensus=self._consensus)

    @property
    def rotates_later(self) -> bool:
        """Whether older checkpoints are deleted in the main thread, after the commit."""
        return not self.is_async or self._parts.hooks.is_overridden("_rotate_checkpoints")

    def finish(self, *, for_next: bool = False) -> None:
        """Wait for a background write, and raise its error. All processes must call it at the same step.

        Args:
            for_next: Whether the next save waits; a long wait is logged once.
        """
        flight = self._flight
        if flight is None:
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

    def finish_named(self, name: str) -> None:
        """Finish the write of this name, if it is not finished yet; at the agreed boundary."""
        if self._flight is not None and self._flight.name == name:
            self._flight.finish()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        flight, self._flight = self._flight, None
        # A program that must end at once does not wait: the pending write is lost.
        if flight is not None and not isinstance(error, KeyboardInterrupt):
            watch = self._parts.strategy.watch
            if self._consensus is not None and error is not None and watch is not None and watch.is_peer_gone(error):
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
        args, strategy, pending = self._parts.args, self._parts.strategy, self._parts.pending
        model, optimizer = self._parts.wrapped, self._parts.optimizer

        def show(keep: Keep) -> None:
            shard_writers(strategy, model, None if args.save_only_model else optimizer, keep)
            if strategy.shards_model:  # the rest must be gathered, which costs more than its memory
                return
            model_writer(self._parts, keep)
            if self.manager.is_committer and not self.manager.only_model:
                keep(strategy.optimizer_state(model, optimizer))

        def reserve() -> None:
            if not expected_state_bytes(optimizer):  # otherwise its first step was skipped
                pending.remove(reserve)
                copies.reserve(show)

        pending.append(reserve)

    def _commit(self, save: Save, group: Group) -> Path:
        while True:
            try:
                return self.manager.save(save.step, main=save.main, each=save.each, facts=save.facts, group=group)
            except NoSpaceError:
                is_pruning, best = self._policy.on_full_disk == "prune", self._parts.best_checkpoint()
                # Each iteration deletes at least one, so this ends.
                if not is_pruning or group.all_true(not self.manager.prune(save.num_bytes, best=best)):
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

    def _obstacle(self) -> str | None:
        """Return why nothing can be written in the background, None if it can."""
        trainer, strategy, model = self._parts.trainer, self._parts.strategy, self._parts.model
        for hook in _WRITING_HOOKS:
            if self._parts.hooks.is_overridden(hook):
                return f"{type(trainer).__name__}.{hook} writes, or reads, the files itself."
        if not strategy.saves_in_background:
            return f"strategy={strategy.name!r} has parts of its state written by another library."
        if getattr(model, "hf_quantizer", None) is not None and not saves_adapters(model):
            return "The weights of a quantized model are only available while it is saved."
        return None


@contextmanager
def as_of(state: TrainerState, save: Save) -> Iterator[None]:
    """Set the documented state to a save's step within the context: callbacks find the checkpoint's folder by it."""
    now = state.global_step, state.epoch
    state.global_step, state.epoch = save.step, save.epoch
    try:
        yield
    finally:
        state.global_step, state.epoch = now


def make_manager(
    trainer: TrainerHooks, hooks: Hooks, output: Output, uploads: NodeUploads | None = None
) -> CheckpointManager:
    """Return the manager that saves and finds the checkpoints of a run."""
    args, folder = trainer.args, Path(hooks.get_output_dir(hooks.trial))
    return CheckpointManager(
        folder,
        group=trainer.strategy,
        save_total_limit=args.save_total_limit,
        only_model=bool(args.save_only_model),
        on_each_node=bool(args.save_on_each_node),
        url=output.url_of(folder),
        keep_best=trainer.save_policy.keep_best,
        is_greater_better=bool(args.greater_is_better),
        uploads=uploads,
    )


# -- the model -------------------------------------------------------------------------------------------------------


def model_writer(parts: RunParts, keep: Keep) -> Callable[[Path], None]:
    """Return a function that writes the current model and its other files. Collective.

    Args:
        keep: Copies tensors to host memory.
    """
    args, strategy, model, tool = parts.args, parts.strategy, parts.wrapped, saved_tool(parts.trainer)
    weights = {} if strategy.model_shards(model) is not None else strategy.model_state(model)
    if not args.should_save:
        return lambda folder: None
    weights, own = keep(dict(weights)), keep(task_state(parts.task))
    face, arguments = with_own_configs(strategy.unwrap(model)), args.to_dict()

    def write(folder: Path) -> None:
        write_model(folder, model=face, weights=weights, own=own, tool=tool, arguments=arguments)

    return write


def write_model(
    folder: Path,
    *,
    model: nn.Module,
    weights: Mapping[str, torch.Tensor] | None,
    own: Mapping[str, torch.Tensor],
    tool: Any,
    arguments: dict[str, Any],
) -> None:
    """Write a model, the state of its task outside the model, the processing class and the arguments."""
    save_weights(model, folder, state_dict=weights, safe=bool(arguments["save_safetensors"]))
    save_task_state(own, folder)
    if hasattr(tool, "save_pretrained"):
        tool.save_pretrained(str(folder))
    save_containers(arguments, folder / ARGUMENTS)


def saved_tool(trainer: TrainerHooks) -> Any:
    """Return what is saved next to a model: the processing class, or the collator's tokenizer."""
    tool = trainer.processing_class
    return getattr(trainer.data_collator, "tokenizer", None) if tool is None else tool
