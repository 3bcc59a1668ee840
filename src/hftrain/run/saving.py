"""How a run saves: through the documented hook, and in the end to the manager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from hftrain.checkpoint.fitting import restoring
from hftrain.checkpoint.manifest import (
    ARGUMENTS,
    MANIFEST,
    OUTSIDE_WEIGHTS,
    UNCOMMITTED,
    checkpoint_name,
    checkpoint_step,
)
from hftrain.checkpoint.rotation import Uncommitted
from hftrain.checkpoint.state_files import Keep, Writer, as_it_is, capture_shards, save_trainer_state
from hftrain.checkpoint.weights import load_task_state, load_weights, save_task_state, save_weights, with_own_configs
from hftrain.checkpoint.writer import Captured, CheckpointWriter, check_shared_folder, saves_at_all
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.core.parameters import stored_in
from hftrain.core.preserve import temporarily
from hftrain.core.signatures import Hooks
from hftrain.core.state import HistoryText, TrainerState
from hftrain.core.types import Owns
from hftrain.preemption.consensus import Consensus
from hftrain.rules.saving import watch_states
from hftrain.run.contents import Contents, checkpoint_bytes
from hftrain.run.counting import RunCounts
from hftrain.run.output import Output
from hftrain.run.parts import RunParts, TrainerHooks
from hftrain.storage.tensors import save_containers
from hftrain.strategies.base import Strategy
from hftrain.task.modes import evaluation_weights
from hftrain.task.module import TaskModule, task_state, without_model

logger = get_logger(__name__)


class Saver:
    """Save the checkpoints of one run, rotate them, and load the best one.

    Attributes:
        saved_step: The step of the last checkpoint.
        tried_step: The last step that was to be saved, whether or not there was room.
        on_begin: Called when a save begins.
    """

    def __init__(self, parts: RunParts, contents: Contents, counts: RunCounts) -> None:
        self._parts, self.manager, self.contents, self._counts = parts, parts.manager, contents, counts
        self.writer: CheckpointWriter = (
            extra("background").BackgroundWriter(parts)
            if parts.save_policy.save_async
            else CheckpointWriter(parts.manager, parts.save_policy, parts.best_checkpoint)
        )
        writes_itself = parts.hooks.is_overridden("_save_checkpoint")
        self._uncommitted = Uncommitted(self.manager.output_dir, deletes=self.manager.is_committer and writes_itself)
        self._history = HistoryText()
        self.saved_step: int | None = None
        self.tried_step: int | None = None
        self.on_begin: Callable[[], None] = lambda: None

    def start(self, *, consensus: Consensus | None, silence: str) -> None:
        """Raise if the run cannot save, and prepare background writes if the policy enables them. Collective.

        Args:
            consensus: How processes agree on background writes; None if there is none.
            silence: The reason if there is none.
        """
        parts, trainer, manager = self._parts, self._parts.trainer, self.manager
        if saves_at_all(parts.args, parts.save_policy):
            if manager.url is None:  # a mirror need not be shared
                check_shared_folder(manager.output_dir, parts.strategy, on_each_node=manager.on_each_node)
            manager.claim()  # deletes leftovers of killed saves, which take space
            self._check_room()
            parts.pending.append(self._check_room)
            watched = parts.args, parts.strategy, parts.optimizer, trainer.lr_scheduler, parts.loops
            read_own = self.contents.registry.own_state
            watch_states(*watched, read_own=read_own, pending=parts.pending, is_overridden=parts.hooks.is_overridden)
        self.writer.start(consensus=consensus, silence=silence)

    def save(self, *, is_planned: bool = True) -> None:
        """Save through the hook, which an override may replace; collective.

        Args:
            is_planned: Whether a run that is never interrupted saves at this step, too.
        """
        # If only the clock saves, its checkpoints are those of the run.
        self.contents.is_planned = is_planned or self._parts.args.save_strategy == "no"
        self.tried_step = None
        # Also set here: an override may wait for other processes before it calls the base method.
        with self._saving():
            self._parts.hooks.save_checkpoint(self._parts.wrapped, self._parts.hooks.trial)
        if self.tried_step is None:  # an override saved in its own way, or decided not to
            self._note_save()
            self._uncommitted.note(self._parts.state.global_step)
            self._parts.events.fire("on_save")

    def save_by_default(self) -> None:
        """Do what the documented hook does: write a checkpoint, now or in the background, then rotate; collective."""
        self._note_save()
        if self._parts.strategy.all_true(not self._parts.args.should_save):
            self._parts.events.fire("on_save")  # a subclass of the arguments turns saving off
            return
        with self._saving():
            self._counts.store()
            with evaluation_weights(self._parts.optimizer), self._parts.unchanged():
                self._capture_and_write()

    def _note_save(self) -> None:
        self.tried_step = self._parts.state.global_step
        self.on_begin()
        # A requested save is done now; if a signal saves before an evaluation that is due, it comes after that.
        self._parts.control.should_save &= self._parts.control.should_evaluate

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._parts.phase, self._parts.is_saving = f"save {checkpoint_name(self._parts.state.global_step)}", True
        with self._parts.journal.paused():
            yield
        # Not in a `finally`: after an error the salvage still asks what failed.
        self._parts.phase, self._parts.is_saving = None, False

    def _capture_and_write(self) -> None:
        parts, contents, writer, state = self._parts, self.contents, self.writer, self._parts.state
        writer.finish(for_next=True)
        contents.finiteness.check(is_planned=contents.is_planned)
        self.manager.save_total_limit = parts.args.save_total_limit  # a callback may have changed them
        self.manager.only_model = bool(parts.args.save_only_model)
        num_bytes = checkpoint_bytes(parts)
        if not writer.make_room(num_bytes, step=state.global_step):
            return
        contents.objects.warn_of_changes()
        contents.metric.link()
        # An uninterrupted run has no checkpoint that was not planned: signals may not decide which model is the best.
        former_best = state.best_model_checkpoint
        if contents.is_planned and state.best_global_step == state.global_step:
            name = checkpoint_name(state.global_step)
            state.best_model_checkpoint = parts.output.text_of(self.manager.output_dir / name)
        state.stateful_callbacks = parts.events.stateful_states()
        captured = self._capture(num_bytes)
        # An override of _maybe_log_save_evaluate that saves also calls `on_save` itself, as documented.
        fires_on_save = not parts.events.answers
        # An override of the hook must not run in the thread that writes.
        rotates_in_main_thread = not writer.is_async or parts.hooks.is_overridden("_rotate_checkpoints")

        def after_write(path: Path | None) -> None:
            if path is None:  # it did not fit on disk after all
                state.best_model_checkpoint = former_best
                return
            if captured.facts.get("is_planned", True):
                contents.metric.note_saved(captured.step, parts.output.text_of(path))
            parts.journal.save(path, step=captured.step, num_bytes=captured.num_bytes)
            # Callbacks find the checkpoint's folder by its step, which has passed if it was written in the background.
            position = {"global_step": captured.step, "epoch": captured.epoch}
            with temporarily(state, **position) if writer.is_async else nullcontext():
                if parts.args.push_to_hub:
                    # Before rotation, which may delete it.
                    parts.hooks.push_from_checkpoint(str(path))
                if rotates_in_main_thread:
                    parts.hooks.rotate_checkpoints(use_mtime=True, output_dir=str(self.manager.output_dir))
                self.saved_step = captured.step
                if fires_on_save:
                    parts.events.fire("on_save")
            if not writer.is_async:
                parts.output.publish_quietly()

        def after_in_thread() -> None:
            if not rotates_in_main_thread:
                self.manager.rotate(best=parts.best_checkpoint())
            parts.output.publish_quietly()

        writer.write(captured, after_write, in_thread=after_in_thread)

    def _capture(self, num_bytes: int) -> Captured:
        """Capture this step's state, copied to host memory if it is written later. Collective."""
        parts, contents, writer, trainer = self._parts, self.contents, self.writer, self._parts.trainer
        state, keep, only_model = parts.state, writer.keep, self.manager.only_model
        # Those that are collective come first. What is saved now goes through save_model, which users override.
        writers: list[Writer] = [
            capture_training_model(parts, keep)
            if writer.is_async
            else lambda folder: trainer.save_model(str(folder), _internal_call=True)
        ]
        if only_model:
            writers += contents.capture_training(keep, names=(OUTSIDE_WEIGHTS,))
        elif parts.hooks.is_overridden("_save_optimizer_and_scheduler"):
            writers.append(lambda folder: parts.hooks.save_optimizer_and_scheduler(str(folder)))
        else:
            writers += contents.capture_training(keep)
        if not only_model:
            writers.append(contents.capture_own(keep))
        writers += capture_shards(parts.strategy, parts.wrapped, None if only_model else parts.optimizer, keep)
        if self.manager.is_committer:
            saved_state = _copy_state(state) if writer.is_async else state
            self._history.take(state.log_history or [])
            writers.append(lambda folder: save_trainer_state(saved_state, folder, self._history))
        facts, step = contents.registry.facts(), state.global_step
        return Captured(step=step, epoch=state.epoch, num_bytes=num_bytes, writers=writers, facts=facts)

    def _check_room(self) -> None:
        """Check before the first step, and after it with the optimizer's state."""
        if self._check_room in self._parts.pending:
            self._parts.pending.remove(self._check_room)
        self.writer.check_room(checkpoint_bytes(self._parts))

    def rotate(self) -> None:
        """Delete the oldest checkpoints beyond the limit."""
        best = self._parts.best_checkpoint()
        self.manager.rotate(best=best)
        self._uncommitted.note(self._parts.state.global_step)  # called by an override that writes it
        self._uncommitted.rotate(self._parts.args.save_total_limit, best=best)

    def keep_only_best(self) -> None:
        """Delete all but the best checkpoint at the end of a run, if the settings ask for one."""
        args, best, keep_best = self._parts.args, self._parts.best_checkpoint(), self._parts.save_policy.keep_best
        # SavePolicy(keep_best=1) keeps the newest in addition to the best.
        keeps_newest = keep_best is not None and not args.load_best_model_at_end
        if args.save_total_limit == 1 and keep_best in (None, 1) and not keeps_newest and best is not None:
            self.manager.keep_only(best)
            self._uncommitted.rotate(1, best=best, keeps_newest=False)

    def write_rank_state(self, folder: Path) -> None:
        """Write this process's state for an override of `_save_checkpoint`, whose folder has no manifest."""
        folder.mkdir(parents=True, exist_ok=True)
        self.contents.capture_own(as_it_is, UNCOMMITTED)(folder)

    def write_training(self, folder: Path) -> None:
        """Do what `_save_optimizer_and_scheduler` does: write optimizer, schedule and scaler. Collective."""
        for write in self.contents.capture_training():
            write(folder)

    def warn_of_others(self) -> None:
        """Warn if the folder of a new run already contains checkpoints."""
        if not self.manager.is_committer or self._parts.args.overwrite_output_dir:
            return
        checkpoint_names = self.manager.names()
        if checkpoint_names:
            logger.warning(
                "%s contains checkpoints of another run (%s). A new checkpoint replaces one of the same step; the "
                "others are kept. Use another output_dir, or set overwrite_output_dir=True if this is intended.",
                self.manager.url or self.manager.output_dir,
                ", ".join(checkpoint_names),
            )

    def load_best(self) -> None:
        """Load the best checkpoint's model, or warn if there is none."""
        self.writer.finish()
        best = self._parts.best_checkpoint()
        if best is not None:
            self._parts.output.fetch_best(best)
        if best is None or not best.is_dir():
            logger.warning(
                "load_best_model_at_end=True: the last model stays, because %s.",
                "no evaluation had a number to compare" if best is None else f"the best one, {best}, is not there",
            )
            return
        if (best / MANIFEST).exists() or not self._parts.hooks.is_overridden("_save_checkpoint"):
            self.manager.open(best)
        with restoring(best):
            self._parts.hooks.load_from_checkpoint(str(best))
            self._parts.trained.load(best)
            self.contents.objects.load_weights(best)
        state = self._parts.state
        logger.info("Loaded the best model from %s (%s).", best, state.best_metric)
        if checkpoint_step(best.name) not in (None, state.best_global_step):
            logger.warning(
                "The best evaluation (%s, step %s) has no checkpoint: %s is loaded, the best before it that has one. "
                "Save at every evaluation, for example with save_strategy='best'.",
                *(state.best_metric, state.best_global_step, best.name),
            )


def _copy_state(state: TrainerState) -> TrainerState:
    """Return a copy of the documented state, independent of later steps, without the log history."""
    frozen = copy.copy(state)
    frozen.log_history = []  # stored in `HistoryText`
    frozen.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return frozen


def capture_training_model(parts: RunParts, keep: Keep) -> Writer:
    """Return a function that writes the current model and its other files. Collective."""
    strategy, model = parts.strategy, parts.wrapped
    weights = {} if strategy.model_shards(model) is not None else dict(strategy.model_state(model))
    if not parts.args.should_save:
        return lambda folder: None
    return capture_model(parts.trainer, with_own_configs(strategy.unwrap(model)), weights, keep)


def capture_model(trainer: TrainerHooks, model: nn.Module, weights: Any, keep: Keep = as_it_is) -> Writer:
    """Return a function that writes a model, the task's other state, the processing class and the arguments.

    Args:
        model: Not wrapped.
        weights: What is written of it by name; None for its own, an empty one for its configuration only.
    """
    weights, other_state, arguments = keep(weights), keep(task_state(trainer.task)), trainer.args.to_dict()
    tool: Any = trainer.processing_class
    tool = getattr(trainer.data_collator, "tokenizer", None) if tool is None else tool

    def write(folder: Path) -> None:
        save_weights(model, folder, state_dict=weights, safe=bool(arguments["save_safetensors"]))
        save_task_state(other_state, folder)
        if hasattr(tool, "save_pretrained"):
            tool.save_pretrained(str(folder))
        save_containers(arguments, folder / ARGUMENTS)

    return write


def write_model(
    trainer: TrainerHooks, hooks: Hooks, output: Output, output_dir: str | None, *, is_internal: bool
) -> Path | None:
    """Do what the documented `save_model` does; return the folder of a model that processes have saved together.

    Args:
        is_internal: Whether it is part of a checkpoint, where each process may write its own part of the model; one
            saved by the user is always whole.
    """
    strategy, folder = trainer.strategy, output.locate(output_dir) if output_dir else output.folder
    is_sharded = strategy.shards_model or Owns.STEP in strategy.owns
    is_uploaded = trainer.args.push_to_hub or output.url_of(folder) is not None
    if not is_internal and (is_sharded or is_uploaded) and strategy.watch is not None:
        strategy.watch.meet("save_model")
    is_split = is_internal and strategy.model_shards(trainer.model_wrapped) is not None
    with evaluation_weights(trainer.optimizer), trainer.callback_handler.evaluation_weights(live=is_internal):
        weights = {} if is_split else strategy.model_state(trainer.model_wrapped)
        if trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            if not is_internal:
                logger.info("Saving model checkpoint to %s", folder)
            hooks.save(str(folder), state_dict=weights)
    if not (is_internal or is_sharded or is_uploaded):
        return None  # so that the main process may save alone
    if not (is_internal and output_dir):
        output.publish_together(output_dir)
    if is_internal:
        return None
    strategy.barrier()
    return folder


def load_task(
    task: TaskModule, bare: nn.Module, strategy: Strategy, folder: Path, *, model: nn.Module | None = None
) -> None:
    """Load a checkpoint's weights, and the task's state outside its model, in place.

    Args:
        bare: The task's model, not wrapped.
        model: Another model to load the weights into.
    """
    target = bare if model is None else strategy.unwrap(model)
    is_meta = [parameter.is_meta for parameter in target.parameters()]
    if any(is_meta) and stored_in(target):
        extra("attaching").attach_weights(target, folder)
    # If there are none yet, the process that has the weights sends them. A stage of a pipeline has some.
    elif not is_meta or not all(is_meta):
        load_weights(target, folder, strategy=strategy if target is bare else None)
    with without_model(task):
        task.load_state_dict(load_task_state(folder, task.state_dict().keys()))
