"""How a run saves: through the documented hook, and in the end to the manager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from hftrain.checkpoint.attaching import attach_weights
from hftrain.checkpoint.fitting import restoring
from hftrain.checkpoint.foreign import UNCOMMITTED
from hftrain.checkpoint.layout import MANIFEST, OUTSIDE_WEIGHTS, checkpoint_name, checkpoint_step
from hftrain.checkpoint.manager import Writer
from hftrain.checkpoint.participants import writers
from hftrain.checkpoint.rotation import Uncommitted
from hftrain.checkpoint.state_files import as_it_is, save_trainer_state, shard_writers
from hftrain.checkpoint.weights import load_task_state, load_weights
from hftrain.core.log import get_logger
from hftrain.core.meta import stored_in
from hftrain.core.state import HistoryText, TrainerState
from hftrain.optim.weight_modes import evaluation_weights
from hftrain.run.contents import Contents
from hftrain.run.counting import RunCounts
from hftrain.run.parts import RunParts
from hftrain.run.writing import CheckpointWrites, Save, as_of, model_writer
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule, without_model

logger = get_logger(__name__)


class Saver:
    """Save the checkpoints of one run, rotate them, and load the best one.

    Args:
        contents: What they hold besides the model.

    Attributes:
        saved_step: The step of the last checkpoint.
        tried_step: The last step that was to be saved, whether or not there was room.
        on_begin: Called when a save begins.
    """

    def __init__(self, parts: RunParts, contents: Contents, counts: RunCounts) -> None:
        self._parts, self.manager, self.contents, self._counts = parts, parts.manager, contents, counts
        self.writes = CheckpointWrites(parts)
        is_own = parts.trainer._is_overridden("_save_checkpoint")
        self._uncommitted = Uncommitted(self.manager.output_dir, deletes=self.manager.is_committer and is_own)
        self._history = HistoryText()
        self._num_saves = 0
        self.saved_step: int | None = None
        self.tried_step: int | None = None
        self.on_begin: Callable[[], None] = lambda: None

    def save(self, *, is_planned: bool = True) -> None:
        """Save through the hook, which an override may replace; collective.

        Args:
            is_planned: Whether a run that is never interrupted saves at this step, too.
        """
        # If only the clock saves, its checkpoints are those of the run.
        self.contents.is_planned = is_planned or self._parts.args.save_strategy == "no"
        num_saves = self._num_saves
        # Also set here: an override may wait for other processes before it calls the base method.
        with self._saving():
            self._parts.trainer._save_checkpoint(self._parts.wrapped, self._parts.trial)
        if self._num_saves == num_saves:  # an override saved in its own way, or decided not to
            self._begin()
            self._uncommitted.note(self._parts.state.global_step)
            self._end_without()

    def commit(self) -> None:
        """Do what the documented hook does: write a checkpoint, now or in the background, then rotate; collective."""
        self._begin()
        if self._parts.strategy.all_true(not self._parts.args.should_save):
            self._end_without()  # a subclass of the arguments turns saving off
            return
        with self._saving():
            self._counts.store()
            with evaluation_weights(self._parts.optimizer), self._parts.unchanged():
                self._write()

    def _begin(self) -> None:
        self._num_saves += 1
        self.on_begin()
        # If a signal saves before an evaluation, the requested save comes after it.
        self._parts.control.should_save &= self._parts.control.should_evaluate

    def _end_without(self) -> None:
        """End a save that committed nothing."""
        self.tried_step = self._parts.state.global_step
        self._parts.events.fire("on_save")

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._parts.phase = f"save {checkpoint_name(self._parts.state.global_step)}"
        with self._parts.journal.paused():
            yield
        self._parts.phase = None

    def _write(self) -> None:
        parts, contents, writes, trainer = self._parts, self.contents, self.writes, self._parts.trainer
        args, strategy, state, keep = parts.args, parts.strategy, parts.state, writes.keep
        writes.finish(for_next=True)
        contents.finiteness.check(is_planned=contents.is_planned)
        limit, only_model = args.save_total_limit, bool(args.save_only_model)  # a callback may have changed them
        self.manager.save_total_limit, self.manager.only_model = limit, only_model
        self.tried_step = state.global_step
        num_bytes = writes.make_room(step=state.global_step)
        if num_bytes is None:
            return
        contents.objects.tell_of_changes()
        contents.metric.link()
        # An uninterrupted run has no checkpoint that was not planned: signals may not decide which model is the best.
        former_best = state.best_model_checkpoint
        if contents.is_planned and state.best_global_step == state.global_step:
            name = checkpoint_name(state.global_step)
            state.best_model_checkpoint = parts.output.text_of(self.manager.output_dir / name)
        state.stateful_callbacks = parts.events.stateful_states()
        writes.begin()
        each: list[Writer] = [
            model_writer(parts, keep)
            if writes.is_async
            else lambda folder: trainer.save_model(str(folder), _internal_call=True)
        ]
        frozen = _frozen(state) if writes.is_async else state
        if self.manager.is_committer:
            self._history.take(state.log_history or [])
        main: list[Writer] = [lambda folder: save_trainer_state(frozen, folder, self._history)]
        files = [file for file in contents.files() if file.name == OUTSIDE_WEIGHTS or not only_model]
        if trainer._is_overridden("_save_optimizer_and_scheduler") and not only_model:
            each.append(lambda folder: trainer._save_optimizer_and_scheduler(str(folder)))
        else:
            # Other processes only take part in gathering.
            main += writers(files, keep if self.manager.is_committer else as_it_is)
            each += [] if only_model else contents.objects.shard_writers(keep)
        if not only_model:
            each.append(contents.rank_writer(keep))
        each += shard_writers(strategy, parts.wrapped, None if only_model else parts.optimizer, keep)
        facts = {name: fact for one in contents.facts() for name, fact in one.state_dict().items()}
        save = Save(step=state.global_step, epoch=state.epoch, num_bytes=num_bytes, main=main, each=each, facts=facts)
        # An override of _maybe_log_save_evaluate that saves also calls `on_save` itself, as documented.
        fires = not parts.events.answers
        writes.write(save, lambda save, path: self._after(save, path, former_best=former_best, fires=fires))

    def _after(self, save: Save, committed: Path | None, *, former_best: str | None, fires: bool) -> None:
        """Do what follows a commit, or undo the state of a checkpoint that did not fit on disk."""
        parts, state, trainer = self._parts, self._parts.state, self._parts.trainer
        if committed is None:
            state.best_model_checkpoint = former_best
            return
        if save.facts.get("is_planned", True):
            self.contents.metric.note_saved(save.step, parts.output.text_of(committed))
        parts.journal.save(committed, step=save.step, num_bytes=save.num_bytes)
        with as_of(state, save):
            if parts.args.push_to_hub:
                # Before rotation, which may delete it.
                trainer._push_from_checkpoint(str(committed))
            if self.writes.rotates_later:
                trainer._rotate_checkpoints(use_mtime=True, output_dir=str(self.manager.output_dir))
            self.saved_step = save.step
            if fires:
                parts.events.fire("on_save")
        if not self.writes.is_async:
            parts.output.publish_quietly()

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
        with_newest = keep_best is not None and not args.load_best_model_at_end
        if args.save_total_limit == 1 and keep_best in (None, 1) and not with_newest and best is not None:
            self.manager.keep_only(best)
            self._uncommitted.rotate(1, best=best, keeps_newest=False)

    def write_numbers(self, folder: Path) -> None:
        """Write this process's state for an override of `_save_checkpoint`, whose folder has no manifest."""
        folder.mkdir(parents=True, exist_ok=True)
        self.contents.rank_writer(as_it_is, UNCOMMITTED)(folder)

    def warn_of_others(self) -> None:
        """Warn if the folder of a new run already contains checkpoints."""
        if not self.manager.is_committer or self._parts.args.overwrite_output_dir:
            return
        found = self.manager.names()
        if found:
            logger.warning(
                "%s contains checkpoints of another run (%s). A new checkpoint replaces one of the same step; the "
                "others are kept. Use another output_dir, or set overwrite_output_dir=True if this is intended.",
                self.manager.url or self.manager.output_dir,
                ", ".join(found),
            )

    def load_best(self) -> None:
        """Load the best checkpoint's model, or warn if there is none."""
        self.writes.finish()
        best = self._parts.best_checkpoint()
        if best is not None:
            self._parts.output.fetch_best(best)
        if best is None or not best.is_dir():
            logger.warning("load_best_model_at_end=True found no saved best model (%s); the last one stays.", best)
            return
        if (best / MANIFEST).exists() or not self._parts.trainer._is_overridden("_save_checkpoint"):
            self.manager.open(best)
        with restoring(best):
            self._parts.trainer._load_from_checkpoint(str(best))
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


def _frozen(state: TrainerState) -> TrainerState:
    """Return a copy of the documented state, independent of later steps, without the log history."""
    frozen = copy.copy(state)
    frozen.log_history = []  # stored in `HistoryText`
    frozen.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return frozen


def load_task(
    task: TaskModule, bare: nn.Module, strategy: Strategy, folder: Path, *, model: nn.Module | None = None
) -> None:
    """Load a checkpoint's weights, and the task's state outside its model, in place.

    Args:
        bare: The task's model, not wrapped.
        model: Another model to load the weights into.
    """
    target = bare if model is None else strategy.unwrap(model)
    are_elsewhere = [parameter.is_meta for parameter in target.parameters()]
    if any(are_elsewhere) and stored_in(target):
        attach_weights(target, folder)
    # If there are none yet, the process that has the weights sends them. A stage of a pipeline has some.
    elif not are_elsewhere or not all(are_elsewhere):
        load_weights(target, folder, strategy=strategy if target is bare else None)
    with without_model(task):
        task.load_state_dict(load_task_state(folder, task.state_dict().keys()))
