"""What a checkpoint of a run holds besides the model, and how it is restored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.fitting import check_state
from hftrain.checkpoint.foreign import check_foreign_optimizer, is_foreign
from hftrain.checkpoint.layout import MANIFEST, OPTIMIZER, OUTSIDE_WEIGHTS, OWN_OPTIMIZERS, SCALER, SCHEDULER
from hftrain.checkpoint.manager import Writer
from hftrain.checkpoint.manifest import read_manifest
from hftrain.checkpoint.participants import InFile, InManifest, Participant, gather, restore, writers
from hftrain.checkpoint.shape import check_geometry
from hftrain.checkpoint.state_files import (
    Keep,
    as_it_is,
    check_engine,
    load_own,
    load_part,
    restore_optimizer,
    restore_scaler,
    save_rng,
    whole_state,
)
from hftrain.core.log import get_logger
from hftrain.core.seed import capture_rng, draw_as_a_loader, preserved_rng, restore_rng
from hftrain.core.tree import map_tensors
from hftrain.loops.registry import LoopStates
from hftrain.optim.schedules import refresh_rate
from hftrain.run.best import BestMetric
from hftrain.run.checkpoint_objects import CheckpointObjects
from hftrain.run.finiteness import Finiteness, Rewind
from hftrain.run.parts import RunParts
from hftrain.run.plan import RunPlan
from hftrain.storage.tensors import save_tensors
from hftrain.strategies.base import has_engine
from hftrain.task.metric_state import metric_states, restore_metric_states

logger = get_logger(__name__)

# Actions that may still be due at a step boundary when its checkpoint is saved; the resumed run does them first. One
# requested by a signal does not wait for an evaluation that is due at the same boundary. One of a run's last step comes
# before the actions at the end of the last epoch, and no further step would trigger them.
LOG, EVALUATE, SAVE, END_EPOCH, END_RUN = _KNOWN = ("log", "evaluate", "save", "end_epoch", "end_run")


class Contents:
    """Lists of named participants, which a save and a resume use in the same order.

    Args:
        plan: Has the manifest of the checkpoint to resume from.
    """

    def __init__(self, parts: RunParts, plan: RunPlan) -> None:
        self._parts, self._plan = parts, plan
        self.loops = LoopStates(parts.loops)
        self.objects = CheckpointObjects(parts, self.loops)
        self.metric = BestMetric(parts.args, parts.state, keep_best=parts.save_policy.keep_best)
        parts.trained.follow(parts.model, parts.optimizer)
        self.rewind = Rewind(parts, self.objects)
        self.finiteness = Finiteness(parts, self.rewind)
        # The random numbers from which the order of the epoch was drawn.
        self._epoch_rng: dict[str, Any] = {}
        # A checkpoint, and its random numbers until they are restored.
        self._folder, self._numbers = Path(), dict[str, Any]()
        # What was still due when the checkpoint was saved.
        self.left: frozenset[str] = frozenset()
        # An earlier result of `own_state`, to be saved instead.
        self.past_state: dict[str, Any] | None = None
        self.is_planned = True

    def close(self) -> None:
        """Restore the optimizers to their form before the run."""
        self.objects.close(is_complete=False)
        self._parts.trained.close()

    # -- the lists: a new feature adds one entry to one of them ---------------------------------------------------

    def files(self) -> list[InFile]:
        """Return the participants with a separate file."""
        strategy, precision, schedule = self._parts.strategy, self._parts.precision, self._parts.trainer.lr_scheduler
        model, optimizer, trained = self._parts.wrapped, self._parts.optimizer, self._parts.trained

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
            InFile(OUTSIDE_WEIGHTS, trained.state_dict, trained.load, save_tensors),
            InFile(OWN_OPTIMIZERS, self.objects.state_dict, self.objects.load),
        ]

    def _own_parts(self) -> list[Participant]:
        """Return the participants that differ by process, except random numbers."""
        parts, task, plan, feed = self._parts, self._parts.task, self._plan, self._parts.data.feed
        device, losses, logs, computing = parts.strategy.device, parts.losses, parts.logs, parts.computing

        def load_data(state: Any) -> None:
            assert plan.saved is not None
            # If several processes read a stream, the position of each differs from the common one.
            is_alone = plan.saved.facts["geometry"]["world_size"] == parts.strategy.data.world_size == 1
            if plan.is_reshaped and isinstance(state, dict):
                state.pop("ahead", None)
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
            Participant("epoch_rng", lambda: self._epoch_rng, partial(setattr, self, "_epoch_rng"), {}),
            Participant("data", feed.state_dict, load_data),
            Participant("loss_window", losses.state_dict, partial(losses.load_state_dict, device=device), {}),
            Participant("log_window", logs.state_dict, partial(logs.load_state_dict, device=device), {}),
            Participant("train_metrics", lambda: metric_states(task.metrics("train")), load_metrics, {}),
            Participant("loops", lambda: self.loops.state_dict() or None, self.loops.load_state_dict, {}),
            Participant("generators", self.objects.generator_states, self.objects.load_generators, {}),
            Participant("past", lambda: computing.past, load_memory),
        ]

    def facts(self) -> list[InManifest]:
        """Return the participants in the manifest."""
        parts, optimizer = self._parts, type(self._parts.optimizer).__name__
        return [
            InManifest(
                lambda: self._plan.facts(parts.progress, num_batches=parts.loop.num_batches, optimizer=optimizer)
            ),
            InManifest(self._to_do, self._take_left),
            InManifest(self._parts.trained.changes, self._parts.trained.repeat),
            InManifest(self.metric.state_dict, self.metric.load_state_dict),
            InManifest(self.finiteness.state_dict, self.finiteness.load_state_dict),
            *self._parts.facts,
        ]

    def _to_do(self) -> dict[str, Any]:
        """Return the actions that callbacks, or the end of the run, require at this boundary and are not done yet."""
        control, progress = self._parts.control, self._parts.progress
        is_due = {
            LOG: control.should_log,
            EVALUATE: control.should_evaluate,
            # This checkpoint completes a save that was requested without an evaluation.
            SAVE: control.should_evaluate and control.should_save,
            END_EPOCH: control.should_epoch_stop and progress.micro_steps_in_epoch > 0,
            END_RUN: self._parts.loop.is_within_epoch and progress.step >= self._parts.state.max_steps,
        }
        # At the end of an incomplete epoch, a callback has stopped the run or the epoch.
        is_planned = self.is_planned and (self._parts.loop.is_within_epoch or not progress.micro_steps_in_epoch)
        extra = {} if is_planned else {"is_planned": False}
        return {"left": [name for name in _KNOWN if is_due[name]], **extra}

    def _take_left(self, facts: Mapping[str, Any]) -> None:
        left = facts.get("left")
        self.left = frozenset(name for name in _KNOWN if isinstance(left, list) and name in left)

    def own_state(self) -> dict[str, Any]:
        """Return the state that differs by process."""
        return {**capture_rng(), **gather(self._own_parts())}

    def rank_writer(self, keep: Keep = as_it_is, *marks: str) -> Writer:
        """Return a function that writes this process's state into a checkpoint; `keep` copies it for a later write."""
        state = {**(self.past_state or self.own_state()), **dict.fromkeys(marks, True)}
        strategy, own = self._parts.strategy, map_tensors(keep(state), torch.Tensor.cpu)
        return lambda folder: save_rng(own, folder, rank=strategy.rank, world_size=strategy.world_size)

    # -- restoring -----------------------------------------------------------------------------------------------

    def restore(self, folder: Path) -> None:
        """Load everything but the model; the random numbers are restored when the loop has opened the data."""
        parts, strategy, saved = self._parts, self._parts.strategy, self._plan.saved
        assert saved is not None
        if not is_foreign(folder):
            check_geometry(
                saved.facts.get("geometry", {}), {"optimizer": type(self._parts.optimizer).__name__}, step=saved.step
            )
        for fact in self.facts():
            if fact.load_state_dict is not None:
                fact.load_state_dict(saved.facts)
        if saved.is_planned:
            is_here = folder.resolve().parent == self._parts.manager.output_dir.resolve()
            self.metric.note_saved(saved.step, parts.output.text_of(folder) if is_here else str(folder))
        self._parts.trainer._load_optimizer_and_scheduler(str(folder))
        own = load_own(folder, strategy, saved.facts["geometry"])
        restore(self._own_parts(), own)
        self.finiteness.begin()
        parts.events.restore(parts.state.stateful_callbacks, is_full=parts.args.restore_callback_states_from_checkpoint)
        with preserved_rng():  # check now, rather than in the loop, that they are valid
            for numbers in (self._epoch_rng, own) if self._epoch_rng else (own,):
                restore_rng(numbers)
        self._folder, self._numbers = folder, own
        if parts.args.ignore_data_skip:
            # Documented: start the epoch's data again, with the current random numbers.
            self._numbers, parts.progress.micro_steps_in_epoch, parts.progress.offset_in_epoch = {}, 0, 0
            self._parts.data.feed.load_state_dict(None)

    def begin_epoch(self) -> None:
        """Note the random numbers from which an epoch's order may be drawn, or restore the checkpoint's."""
        if self._numbers and self._parts.progress.is_within_epoch:
            # A checkpoint of another trainer does not contain those from which the epoch's order was drawn.
            restore_rng(self._epoch_rng or self._numbers)
        else:
            self.load_numbers()
            self._epoch_rng = capture_rng()
            self._parts.computing.past = None
        if self._parts.data.feed.draws_a_seed(self._parts.progress.epoch):
            draw_as_a_loader()

    def load_numbers(self) -> None:
        """Restore the checkpoint's random numbers through the documented hook, if that has not been done."""
        if self._numbers:
            self._parts.trainer._load_rng_state(str(self._folder))
            self._numbers = {}

    def restore_numbers(self) -> None:
        """Do what the hook does, for `load_numbers`."""
        if self._numbers:
            restore_rng(self._numbers)

    def write_optimizer(self, folder: Path) -> None:
        """Write optimizer, schedule and scaler, in the main process, and own shards. Collective."""
        found = writers(self.files(), as_it_is)
        for write in [*(found if self._parts.manager.is_committer else ()), *self.objects.shard_writers(as_it_is)]:
            write(folder)

    def read_optimizer(self, folder: Path) -> None:
        """Load optimizer, schedule and scaler. Collective."""
        for each in self.files():
            each.load(folder)
