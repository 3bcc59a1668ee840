"""What a run saves in a checkpoint, and how it is restored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.fitting import check_state, restoring
from hftrain.checkpoint.foreign import check_foreign_optimizer, is_foreign
from hftrain.checkpoint.layout import (
    MANIFEST,
    OPTIMIZER,
    OUTSIDE_WEIGHTS,
    OWN_OPTIMIZERS,
    SCALER,
    SCHEDULER,
    checkpoint_name,
    checkpoint_step,
)
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.manifest import read_manifest
from hftrain.checkpoint.participants import InFile, InManifest, Participant, gather, restore, writers
from hftrain.checkpoint.parts import load_part, save_rng, save_trainer_state
from hftrain.checkpoint.shape import check_geometry
from hftrain.checkpoint.states import (
    as_it_is,
    check_engine,
    load_own,
    restore_optimizer,
    restore_scaler,
    shard_writers,
    whole_state,
)
from hftrain.checkpoint.weights import load_task_state, load_weights
from hftrain.core.history import HistoryText
from hftrain.core.log import get_logger
from hftrain.core.seed import capture_rng, preserved_rng, restore_rng
from hftrain.core.tree import map_tensors
from hftrain.optim.schedules import refresh_rate
from hftrain.run.best import BestMetric
from hftrain.run.capture import frozen_state, model_writer, saved_tool
from hftrain.run.data import RunData
from hftrain.run.finiteness import Finiteness
from hftrain.run.loop_states import LoopStates
from hftrain.run.own_optimizers import OwnOptimizers
from hftrain.run.parts import Ready, RunParts
from hftrain.run.plan import RunPlan
from hftrain.run.unfinished import left_in, to_do
from hftrain.run.unfreezing import Unfreezing
from hftrain.run.untrained import Untrained, check_schedule
from hftrain.run.writing import CheckpointWrites, Save, as_of, saves_at_all
from hftrain.storage.tensors import save_tensors
from hftrain.strategies.base import Strategy, has_engine
from hftrain.task.metric_state import metric_states, restore_metric_states
from hftrain.task.module import TaskModule, without_model

logger = get_logger(__name__)

Writer = Callable[[Path], None]


class RunCheckpoints:
    """Save and restore one run, as lists of named participants.

    Args:
        manager: Commits the checkpoints.
        plan: The run's plan.
        data: The run's data.
        is_within_epoch: Tells whether the actions at the end of the epoch are still due.
    """

    def __init__(
        self,
        parts: RunParts,
        ready: Ready,
        manager: CheckpointManager,
        *,
        plan: RunPlan,
        data: RunData,
        is_within_epoch: Callable[[], bool],
    ) -> None:
        self._parts, self._ready, self._plan, self._data, trainer = parts, ready, plan, data, parts.trainer
        self._is_within_epoch = is_within_epoch
        self.manager = manager
        self.writes = CheckpointWrites(parts, ready, manager, best=self.best)
        self.loops = LoopStates(parts.loops)
        self.own = OwnOptimizers(parts, ready, self.loops)
        self.metric = BestMetric(parts.args, parts.state, keep_best=parts.save_policy.keep_best)
        self._unfreezing = Unfreezing(parts, ready)
        self.finiteness = Finiteness(parts, ready, manager, self.own, self._unfreezing)
        self._history = HistoryText()
        self.saved_step: int | None = None
        self.tried_step: int | None = None
        self.epoch_rng: dict[str, Any] = {}
        # What was still due when the checkpoint was saved.
        self.left: frozenset[str] = frozenset()
        # An earlier result of `own_state`, to be saved instead.
        self.past_state: dict[str, Any] | None = None
        check_schedule(parts.args, trainer.lr_scheduler, max_steps=parts.state.max_steps)
        self.untrained = Untrained(parts, ready, self.own)

    def begin(self) -> None:
        """Restore what the user declares, and look at what else callbacks hold, once training has begun."""
        args = self._parts.args
        self.own.begin(saves=saves_at_all(args, self._parts.save_policy) and not args.save_only_model)

    def close(self) -> None:
        """Restore the optimizers to their form before the run."""
        self.own.close(is_complete=False)
        self._unfreezing.close()
        self.untrained.close()

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Commit a checkpoint of everything a resume needs, now or in the background, then rotate; collective."""
        parts, ready, writes, trainer = self._parts, self._ready, self.writes, self._parts.trainer
        args, strategy, state, keep = parts.args, parts.strategy, parts.state, writes.keep
        writes.finish(for_next=True)
        self.finiteness.check()
        limit, only_model = args.save_total_limit, bool(args.save_only_model)  # a callback may have changed them
        self.manager.config = replace(self.manager.config, save_total_limit=limit, only_model=only_model)
        num_bytes = writes.checkpoint_bytes()
        self.tried_step = state.global_step
        if not writes.has_room(num_bytes, step=state.global_step):
            return
        self.own.tell_of_changes()
        self.metric.link()
        former_best = state.best_model_checkpoint
        if state.best_global_step == state.global_step:
            name = checkpoint_name(state.global_step)
            state.best_model_checkpoint = parts.output.text_of(self.manager.config.output_dir / name)
        state.stateful_callbacks = parts.events.stateful_states()
        writes.begin()
        each: list[Writer] = [
            model_writer(args, strategy, ready.task, ready.wrapped, tool=saved_tool(trainer), keep=keep)
            if writes.is_async
            else lambda folder: trainer.save_model(str(folder), _internal_call=True)
        ]
        frozen = frozen_state(state) if writes.is_async else state
        if self.manager.is_committer:
            self._history.take(state.log_history or [])
        main: list[Writer] = [lambda folder: save_trainer_state(frozen, folder, self._history)]
        files = [file for file in self._files() if file.name == OUTSIDE_WEIGHTS or not only_model]
        if trainer._is_overridden("_save_optimizer_and_scheduler") and not only_model:
            each.append(lambda folder: trainer._save_optimizer_and_scheduler(str(folder)))
        else:
            # Other processes only take part in gathering.
            main += writers(files, keep if self.manager.is_committer else as_it_is)
        if not only_model:
            each.append(self.rank_writer(self.past_state or self.own_state()))
        each += shard_writers(strategy, ready.wrapped, None if only_model else ready.optimizer, keep)
        facts = {name: fact for one in self._facts() for name, fact in one.state_dict().items()}
        save = Save(step=state.global_step, epoch=state.epoch, num_bytes=num_bytes, main=main, each=each, facts=facts)
        # An override of _maybe_log_save_evaluate that saves also calls `on_save` itself, as documented.
        tells = not parts.events.answers
        writes.write(save, lambda save, path: self._after(save, path, former_best=former_best, tells=tells))

    def settle(self) -> None:
        """Wait for a write in the background, and raise its error. All processes must call it at the same step."""
        self.writes.finish()

    def _after(self, save: Save, committed: Path | None, *, former_best: str | None, tells: bool) -> None:
        """Do what follows a commit, or undo the state of a checkpoint that did not fit on disk."""
        parts, state, trainer = self._parts, self._parts.state, self._parts.trainer
        if committed is None:
            state.best_model_checkpoint = former_best
            return
        self.metric.note_saved(save.step, parts.output.text_of(committed))
        parts.journal.save(committed, step=save.step, num_bytes=save.num_bytes)
        with as_of(state, save):
            if parts.args.push_to_hub:
                # Before rotation, which may delete it.
                trainer._push_from_checkpoint(str(committed))
            if self.writes.rotates_later:
                trainer._rotate_checkpoints(use_mtime=True, output_dir=str(self.manager.config.output_dir))
            self.saved_step = save.step
            if tells:
                parts.events.fire("on_save")
        if not self.writes.is_async:
            parts.output.publish_quietly()

    def write_optimizer(self, folder: Path) -> None:
        """Write optimizer, schedule and scaler, in the main process. Collective."""
        found = writers(self._files(), as_it_is)
        for write in found if self.manager.is_committer else ():
            write(folder)

    def read_optimizer(self, folder: Path) -> None:
        """Load optimizer, schedule and scaler. Collective."""
        for each in self._files():
            each.load(folder)

    # -- what a checkpoint contains besides the model: a new feature adds one entry ------------------------------

    def _files(self) -> list[InFile]:
        """Return the participants with a separate file."""
        strategy, precision, schedule = self._parts.strategy, self._parts.precision, self._parts.trainer.lr_scheduler
        model, optimizer, outside = self._ready.wrapped, self._ready.optimizer, self._ready.outside

        def check(folder: Path, state: dict[str, Any]) -> None:
            check_engine(state, folder / OPTIMIZER, is_deepspeed=has_engine(strategy, "deepspeed"))
            if is_foreign(folder):
                check_foreign_optimizer(state, optimizer, folder)

        def load_optimizer(folder: Path) -> None:
            restore_optimizer(folder, strategy, model, optimizer, check=partial(check, folder))

        def load_schedule(folder: Path) -> None:
            if schedule is not None:
                state = load_part(folder, SCHEDULER)
                check_state(folder / SCHEDULER, state, schedule, own=schedule.state_dict())
                schedule.load_state_dict(state)
                refresh_rate(schedule)

        def load_scale(folder: Path) -> None:
            saved = read_manifest(folder) if (folder / MANIFEST).exists() else self._plan.saved
            # A run in another precision starts with its own loss scale.
            if saved is None or saved.facts["geometry"]["precision"] == precision.policy.name:
                restore_scaler(folder, precision)

        return [
            InFile(OPTIMIZER, lambda: whole_state(strategy, model, optimizer), load_optimizer),
            InFile(SCHEDULER, lambda: None if schedule is None else schedule.state_dict(), load_schedule),
            InFile(SCALER, lambda: precision.state_dict() or None, load_scale),
            InFile(OUTSIDE_WEIGHTS, outside.state_dict, outside.load, save_tensors),
            InFile(OWN_OPTIMIZERS, self.own.state_dict, self.own.load),
        ]

    def _own_parts(self) -> list[Participant]:
        """Return the participants that differ by process, except random numbers."""
        parts, task, plan, feed = self._parts, self._ready.task, self._plan, self._data.feed
        device, losses, logs, computing = parts.strategy.device, parts.losses, parts.logs, parts.computing

        def load_data(state: Any) -> None:
            assert plan.saved is not None
            # If several processes read a stream, the position of each differs from the common one.
            is_alone = plan.saved.facts["geometry"]["world_size"] == parts.strategy.world_size == 1
            feed.load_state_dict(None if not is_alone and plan.is_reshaped and feed.is_stream else state)

        def load_metrics(states: Any) -> None:
            unknown = restore_metric_states(task.metrics("train"), states, device=device)
            if unknown and losses.num_steps and not parts.args.ignore_data_skip:
                logger.warning(
                    "The checkpoint does not contain what these metrics had accumulated since the last log: %s.",
                    ", ".join(unknown),
                )

        def load_memory(past: Any) -> None:
            if parts.progress.micro_steps_in_epoch and not plan.is_reshaped and parts.args.past_index >= 0:
                computing.past = parts.strategy.to_device(past)

        return [
            Participant("epoch_rng", lambda: self.epoch_rng, partial(setattr, self, "epoch_rng"), {}),
            Participant("data", feed.state_dict, load_data),
            Participant("loss_window", losses.state_dict, partial(losses.load_state_dict, device=device), {}),
            Participant("log_window", logs.state_dict, partial(logs.load_state_dict, device=device), {}),
            Participant("train_metrics", lambda: metric_states(task.metrics("train")), load_metrics, {}),
            Participant("loops", lambda: self.loops.state_dict() or None, self.loops.load_state_dict, {}),
            Participant("generators", self.own.generator_states, self.own.load_generators, {}),
            Participant("past", lambda: computing.past, load_memory),
        ]

    def _facts(self) -> list[InManifest]:
        """Return the participants in the manifest."""
        parts, optimizer = self._parts, type(self._ready.optimizer).__name__

        def left() -> dict[str, Any]:
            is_within, last = self._is_within_epoch(), parts.state.max_steps
            return {"left": to_do(parts.control, parts.progress, max_steps=last, is_within_epoch=is_within)}

        return [
            InManifest(lambda: self._plan.facts(parts.progress, optimizer=optimizer)),
            InManifest(left, lambda facts: setattr(self, "left", left_in(facts))),
            InManifest(self._unfreezing.state_dict, self._unfreezing.load_state_dict),
            InManifest(self.metric.state_dict, self.metric.load_state_dict),
            InManifest(self.finiteness.state_dict, self.finiteness.load_state_dict),
            *self._ready.facts,
        ]

    def own_state(self) -> dict[str, Any]:
        """Return the state that differs by process."""
        return {**capture_rng(), **gather(self._own_parts())}

    def rank_writer(self, state: dict[str, Any]) -> Writer:
        """Return a function that writes this process's state into a checkpoint."""
        strategy, own = self._parts.strategy, map_tensors(self.writes.keep(state), torch.Tensor.cpu)
        return lambda folder: save_rng(own, folder, rank=strategy.rank, world_size=strategy.world_size)

    # -- resuming ------------------------------------------------------------------------------------------------

    def warn_of_others(self) -> None:
        """Warn if the folder of a new run already contains checkpoints."""
        if not self.manager.is_committer or self._parts.args.overwrite_output_dir:
            return
        found = self.manager.names()
        if found:
            logger.warning(
                "%s contains checkpoints of another run (%s). A new checkpoint replaces one of the same step; the "
                "others are kept. Use another output_dir, or set overwrite_output_dir=True if this is intended.",
                self.manager.config.url or self.manager.config.output_dir,
                ", ".join(found),
            )

    def load_rest(self, folder: Path) -> dict[str, Any]:
        """Load everything but the model, and return the state of the random numbers."""
        parts, strategy, saved = self._parts, self._parts.strategy, self._plan.saved
        assert saved is not None
        if not is_foreign(folder):
            check_geometry(
                saved.facts.get("geometry", {}), {"optimizer": type(self._ready.optimizer).__name__}, step=saved.step
            )
        for fact in self._facts():
            if fact.load_state_dict is not None:
                fact.load_state_dict(saved.facts)
        is_here = folder.resolve().parent == self.manager.config.output_dir.resolve()
        self.metric.note_saved(saved.step, parts.output.text_of(folder) if is_here else str(folder))
        self._parts.trainer._load_optimizer_and_scheduler(str(folder))
        num_saved = saved.facts["geometry"]["world_size"]
        own = load_own(folder, rank=strategy.rank, world_size=strategy.world_size, num_saved=num_saved)
        restore(self._own_parts(), own)
        self.finiteness.begin()
        parts.events.restore(parts.state.stateful_callbacks, is_full=parts.args.restore_callback_states_from_checkpoint)
        with preserved_rng():  # check now, rather than in the loop, that they are valid
            for numbers in (self.epoch_rng, own) if self.epoch_rng else (own,):
                restore_rng(numbers)
        return own

    def best(self) -> Path | None:
        """Return the folder of the best model so far."""
        best, output = self._parts.state.best_model_checkpoint, self._parts.output
        if best is None:
            return None
        # By name first: the folder of the run may have been moved or copied since.
        here = output.folder / Path(best).name
        return here if here.is_dir() or output.url_of(here.parent) else Path(best)

    def load_best(self) -> None:
        """Load the best checkpoint's model, or warn if there is none."""
        self.settle()
        best = self.best()
        if best is not None:
            self._parts.output.fetch_best(best)
        if best is None or not best.is_dir():
            logger.warning("load_best_model_at_end=True found no saved best model (%s); the last one stays.", best)
            return
        if (best / MANIFEST).exists() or not self._parts.trainer._is_overridden("_save_checkpoint"):
            self.manager.open(best)
        with restoring(best):
            self._parts.trainer._load_from_checkpoint(str(best))
            self._ready.outside.load(best)
        state = self._parts.state
        logger.info("Loaded the best model from %s (%s).", best, state.best_metric)
        if checkpoint_step(best.name) not in (None, state.best_global_step):
            logger.warning(
                "The best evaluation (%s, step %s) has no checkpoint: %s is loaded, the best before it that has one. "
                "Save at every evaluation, for example with save_strategy='best'.",
                *(state.best_metric, state.best_global_step, best.name),
            )


def load_task(
    task: TaskModule, bare: nn.Module, strategy: Strategy, folder: Path, *, model: nn.Module | None = None
) -> None:
    """Load a checkpoint's weights, and the task's state outside its model, in place.

    Args:
        bare: The task's model, not wrapped.
        model: Another model to load the weights into.
    """
    target = bare if model is None else strategy.unwrap(model)
    load = strategy.load_model_state if target is bare else None
    # If there are none yet, the process that has the weights sends them.
    if not any(parameter.is_meta for parameter in target.parameters()):
        load_weights(target, folder, load=load, own=strategy.own_state(target) if load else None)
    with without_model(task):
        task.load_state_dict(load_task_state(folder, task.state_dict().keys()))
