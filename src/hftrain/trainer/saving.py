"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.checkpoint.fitting import check_state, naming_the_folder
from hftrain.checkpoint.foreign import check_foreign_optimizer, is_foreign
from hftrain.checkpoint.layout import OPTIMIZER, OUTSIDE_WEIGHTS, OWN_OPTIMIZERS, SCALER, SCHEDULER, checkpoint_name
from hftrain.checkpoint.manifest import check_geometry
from hftrain.checkpoint.participants import InFile, Participant, gather, restore, writers
from hftrain.checkpoint.parts import load_scheduler, save_rng, save_trainer_state
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
from hftrain.core.log import get_logger
from hftrain.core.progress import Progress
from hftrain.core.seed import capture_rng, preserved_rng, restore_rng
from hftrain.core.tree import map_tensors
from hftrain.data.feed import TrainFeed
from hftrain.loops.window import LogWindow, LossWindow
from hftrain.optim.schedules import refresh_rate
from hftrain.storage.tensors import save_tensors
from hftrain.strategies.base import Strategy
from hftrain.task.metric_state import metric_states, restore_metric_states
from hftrain.task.module import TaskModule
from hftrain.task.state import without_model
from hftrain.trainer.best import BestMetric
from hftrain.trainer.capture import frozen_state, model_writer, saved_tool
from hftrain.trainer.leftovers import to_do
from hftrain.trainer.loop_parts import LoopStates
from hftrain.trainer.outside import OutsideWeights
from hftrain.trainer.own_optimizers import OwnOptimizers
from hftrain.trainer.resuming import RunPlan, report_changed_arguments
from hftrain.trainer.unfreezing import Unfreezing
from hftrain.trainer.untrained import Untrained, check_plateau
from hftrain.trainer.writing import CheckpointWrites, Save, as_of

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Writer = Callable[[Path], None]


class RunCheckpoints:
    """Save and restore one run of a Trainer.

    Args:
        trainer: Whose model, schedule, precision, state and callbacks are saved and restored.
        progress: Where the run is.
        losses: The open logging window, likewise part of a checkpoint so that a resumed log equals the undisturbed.
        logs: The steps' own numbers in that window.
        pending: What the loop calls at each step's end, see `FitParts`.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        progress: Progress,
        losses: LossWindow,
        logs: LogWindow,
        pending: list[Callable[[], None]],
    ) -> None:
        self.trainer = trainer
        self.progress = progress
        self.losses = losses
        self.logs = logs
        self.manager = trainer._make_manager()
        self.writes = CheckpointWrites(trainer, self.manager, progress=progress, pending=pending, best=self.best)
        self.own = OwnOptimizers(
            trainer.strategy,
            task=lambda: trainer.task,
            holders=lambda: [
                ("trainer", trainer),
                *((type(each).__name__, each) for each in trainer.callback_handler.callbacks),
            ],
            known=self._known,
        )
        self.loops = LoopStates(trainer.loops)
        self.outside = OutsideWeights(trainer.strategy)
        self.saved_step: int | None = None
        self.tried_step: int | None = None
        self.epoch_rng: dict[str, Any] = {}
        self.metric = BestMetric(trainer.args, trainer.state)
        # What `own_state` was at an earlier moment, to be saved in its place.
        self.past_state: dict[str, Any] | None = None
        self.plan: RunPlan
        self.unfreezing: Unfreezing
        self.untrained: Untrained
        self.feed: TrainFeed

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow what begins to train while the run lasts, and what no optimizer holds; until `let_go`."""
        trainer, strategy = self.trainer, self.trainer.strategy
        self.unfreezing = Unfreezing(
            strategy,
            trainer.model,
            optimizer,
            schedule=lambda: trainer.lr_scheduler,
            added=lambda: self.outside.find(optimizer, trainer.task),
        )
        check_plateau(trainer.args, trainer.lr_scheduler)
        self.untrained = Untrained(strategy, trainer.task, optimizer, self.own)

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Commit a checkpoint of everything a resume needs, now or in the background, then rotate; collective."""
        self.writes.finish(for_next=True)
        trainer, state, keep = self.trainer, self.trainer.state, self.writes.keep
        # A callback may have changed them.
        limit, only_model = trainer.args.save_total_limit, bool(trainer.args.save_only_model)
        self.manager.config = replace(self.manager.config, save_total_limit=limit, only_model=only_model)
        num_bytes = self.writes.checkpoint_bytes(optimizer)
        self.tried_step = state.global_step
        if not self.writes.has_room(num_bytes, step=state.global_step):
            return
        former_best = state.best_model_checkpoint
        if state.best_global_step == state.global_step:
            best = self.manager.config.output_dir / checkpoint_name(state.global_step)
            state.best_model_checkpoint = trainer._output.text_of(best)
        state.stateful_callbacks = trainer.callback_handler.stateful_states()
        self.writes.begin()
        each: list[Writer] = [
            model_writer(
                trainer.args,
                trainer.strategy,
                trainer.task,
                trainer.model_wrapped,
                tool=saved_tool(trainer.processing_class, trainer.data_collator),
                keep=keep,
            )
            if self.writes.is_async
            else lambda folder: trainer.save_model(str(folder), _internal_call=True)
        ]
        frozen = frozen_state(state) if self.writes.is_async else state
        main: list[Writer] = [lambda folder: save_trainer_state(frozen, folder)]
        if not trainer.args.save_only_model:
            if trainer._is_overridden("_save_optimizer_and_scheduler"):
                each.append(lambda folder: trainer._save_optimizer_and_scheduler(str(folder)))
            else:
                # Others only take part in gathering.
                main += writers(self._files(optimizer), keep if self.manager.is_committer else as_it_is)
            each.append(self._rank_writer())
        sharded = None if trainer.args.save_only_model else optimizer
        each += shard_writers(trainer.strategy, trainer.model_wrapped, sharded, keep)
        facts = self.plan.facts(self.progress)
        facts["geometry"] = {**facts["geometry"], "optimizer": type(optimizer).__name__}
        is_within_epoch = trainer._session is not None and trainer._session.loop.is_within_epoch
        facts["left"] = to_do(
            trainer.control, self.progress, max_steps=state.max_steps, is_within_epoch=is_within_epoch
        )
        facts |= self.unfreezing.state_dict() | self.metric.state_dict()
        save = Save(step=state.global_step, epoch=state.epoch, num_bytes=num_bytes, main=main, each=each, facts=facts)
        # An override of _maybe_log_save_evaluate that saves tells the callbacks itself, as documented.
        tells = not trainer.callback_handler.answers
        self.writes.write(save, lambda save, path: self._after(save, path, former_best=former_best, tells=tells))

    def settle(self) -> None:
        """Wait for a write in the background, and raise its error. All processes must call it at the same step."""
        self.writes.finish()

    def let_go(self) -> None:
        """Leave the optimizers as they were before the run; safe after an error."""
        self.own.close(is_complete=False)
        if hasattr(self, "unfreezing"):
            self.unfreezing.close()
        if hasattr(self, "untrained"):
            self.untrained.close()

    def _after(self, save: Save, committed: Path | None, *, former_best: str | None, tells: bool) -> None:
        """Do what follows a commit, or forget a checkpoint for which there was no room."""
        trainer, state = self.trainer, self.trainer.state
        if committed is None:
            state.best_model_checkpoint = former_best
            return
        with as_of(state, save):
            if trainer.args.push_to_hub:
                # Before rotation, which may delete it.
                trainer._push_from_checkpoint(str(committed))
            if self.writes.rotates_later:
                trainer._rotate_checkpoints(use_mtime=True, output_dir=str(self.manager.config.output_dir))
            self.saved_step = save.step
            if tells:
                trainer.callback_handler.fire("on_save")
        if not self.writes.is_async:
            trainer._output.publish_quietly()

    def rotate(self) -> None:
        """Delete the oldest checkpoints beyond the limit."""
        self.manager.rotate(best=self.best())

    def write_optimizer(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write optimizer, schedule and scaler; the main process writes, all take part. Collective."""
        found = writers(self._files(optimizer), as_it_is)
        for write in found if self.manager.is_committer else ():
            write(folder)

    def read_optimizer(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Load optimizer, schedule and scaler. Collective."""
        for each in self._files(optimizer):
            each.load(folder)

    def _files(self, optimizer: torch.optim.Optimizer) -> list[InFile]:
        """Return what has a file of its own. A new feature adds one entry."""
        strategy, model, schedule = self.trainer.strategy, self.trainer.model_wrapped, self.trainer.lr_scheduler
        precision = self.trainer.precision

        def check(folder: Path, state: dict[str, Any]) -> None:
            check_engine(state, folder / OPTIMIZER, is_deepspeed=self.trainer.is_deepspeed_enabled)
            if is_foreign(folder):
                check_foreign_optimizer(state, optimizer, folder)

        def load_optimizer(folder: Path) -> None:
            restore_optimizer(folder, strategy, model, optimizer, check=partial(check, folder))

        def load_schedule(folder: Path) -> None:
            if schedule is not None:
                state = load_scheduler(folder)
                check_state(folder / SCHEDULER, state, schedule, own=schedule.state_dict())
                schedule.load_state_dict(state)
                refresh_rate(schedule)

        def load_scale(folder: Path) -> None:
            saved = self.plan.saved
            # A run in another precision begins with a loss scale of its own.
            if saved is None or saved.facts["geometry"]["precision"] == precision.policy.name:
                restore_scaler(folder, precision)

        return [
            InFile(OPTIMIZER, lambda: whole_state(strategy, model, optimizer), load_optimizer),
            InFile(SCHEDULER, lambda: None if schedule is None else schedule.state_dict(), load_schedule),
            InFile(SCALER, lambda: precision.state_dict() or None, load_scale),
            InFile(OUTSIDE_WEIGHTS, self.outside.state_dict, self.outside.load, save_tensors),
            InFile(OWN_OPTIMIZERS, self.own.state_dict, self.own.load),
        ]

    def _own_parts(self) -> list[Participant]:
        """Return what differs by process, besides random numbers. A new feature adds one entry."""
        trainer, device = self.trainer, self.trainer.strategy.device

        def load_data(state: Any) -> None:
            assert self.plan.saved is not None
            # Where several processes read a stream, each may have stood elsewhere in it than all together.
            is_alone = self.plan.saved.facts["geometry"]["world_size"] == trainer.strategy.world_size == 1
            is_elsewhere = not is_alone and self.plan.is_reshaped and self.feed.is_stream
            self.feed.load_state_dict(None if is_elsewhere else state)

        def load_metrics(states: Any) -> None:
            unknown = restore_metric_states(trainer.task.metrics("train"), states, device=device)
            if unknown and self.losses.num_steps and not trainer.args.ignore_data_skip:
                logger.warning(
                    "The checkpoint does not tell what these metrics had gathered since the last log: %s.",
                    ", ".join(unknown),
                )

        def load_memory(past: Any) -> None:
            if self.progress.micro_steps_in_epoch and not self.plan.is_reshaped and trainer.args.past_index >= 0:
                trainer._past = trainer.strategy.to_device(past)

        return [
            Participant("epoch_rng", lambda: self.epoch_rng, partial(setattr, self, "epoch_rng"), {}),
            Participant("data", self.feed.state_dict, load_data),
            Participant("loss_window", self.losses.state_dict, partial(self.losses.load_state_dict, device=device), {}),
            Participant("log_window", self.logs.state_dict, partial(self.logs.load_state_dict, device=device), {}),
            Participant("train_metrics", lambda: metric_states(trainer.task.metrics("train")), load_metrics, {}),
            Participant("loops", lambda: self.loops.state_dict() or None, self.loops.load_state_dict, {}),
            Participant("past", lambda: trainer._past, load_memory),
        ]

    def _known(self) -> list[Any]:
        """Return what is saved anyway, whatever attribute of the user's refers to it."""
        trainer = self.trainer
        loops = [loop for loop in trainer.loops.values() if loop.keeps_state]
        return [trainer.optimizer, getattr(trainer.optimizer, "optimizer", None), trainer.lr_scheduler, *loops]

    def own_state(self) -> dict[str, Any]:
        """Return what differs by process."""
        return {**capture_rng(), **gather(self._own_parts())}

    def _rank_writer(self) -> Writer:
        strategy = self.trainer.strategy
        own = self.past_state or self.own_state()
        own = map_tensors(self.writes.keep(own), torch.Tensor.cpu)
        return lambda folder: save_rng(own, folder, rank=strategy.rank, world_size=strategy.world_size)

    def warn_of_others(self) -> None:
        """Say so if the folder of a new run holds checkpoints already."""
        if not self.manager.is_committer or self.trainer.args.overwrite_output_dir:
            return
        found = self.manager.names()
        if found:
            logger.warning(
                "%s holds checkpoints of another run (%s). They stay, except that those of the same step are replaced. "
                "Use another output_dir, or overwrite_output_dir=True to say that this is meant.",
                self.manager.config.url or self.manager.config.output_dir,
                ", ".join(found),
            )

    @naming_the_folder
    def take_over(self, folder: Path, plan: RunPlan) -> None:
        """Go on as the checkpoint's run, and say which arguments have changed."""
        assert plan.saved is not None
        if not is_foreign(folder):
            report_changed_arguments(self.trainer.args, folder)
            self.manager.run_id = plan.saved.facts["run_id"]

    @naming_the_folder
    def load_model(self, folder: Path) -> None:
        """Load the weights, and what the task holds outside its model, in place."""
        self.trainer._load_from_checkpoint(str(folder))

    @naming_the_folder
    def load_rest(self, folder: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Load what the optimizer and its company had reached, and return the random numbers' state."""
        trainer, strategy = self.trainer, self.trainer.strategy
        assert self.plan.saved is not None
        if not is_foreign(folder):
            check_geometry(self.plan.saved, optimizer=type(optimizer).__name__)
        self.unfreezing.load_state_dict(self.plan.saved.facts)
        trainer._load_optimizer_and_scheduler(str(folder))
        num_saved = self.plan.saved.facts["geometry"]["world_size"]
        own = load_own(folder, rank=strategy.rank, world_size=strategy.world_size, num_saved=num_saved)
        restore(self._own_parts(), own)
        trainer.callback_handler.restore(
            trainer.state.stateful_callbacks, is_full=trainer.args.restore_callback_states_from_checkpoint
        )
        with preserved_rng():  # now, for the loop that restores them is no place to find out that they are none
            for numbers in (self.epoch_rng, own) if self.epoch_rng else (own,):
                restore_rng(numbers)
        return own

    def best(self) -> Path | None:
        """Return the folder of the best model so far."""
        best, output = self.trainer.state.best_model_checkpoint, self.trainer._output
        if best is None:
            return None
        # By name first: the folder of the run may have been moved or copied since.
        here = output.folder / Path(best).name
        return here if here.is_dir() or output.url_of(here.parent) else Path(best)

    def load_best(self) -> None:
        """Load the best checkpoint's model, saying so if there is none."""
        self.settle()
        best = self.best()
        if best is not None:
            self.trainer._output.fetch_best(best)
        if best is None or not best.is_dir():
            logger.warning("load_best_model_at_end=True found no saved best model (%s); the last one stays.", best)
            return
        self.manager.open(best)
        self.load_model(best)
        logger.info("Loaded the best model from %s (%s).", best, self.trainer.state.best_metric)


def load_task(
    task: TaskModule, bare: nn.Module, strategy: Strategy, folder: Path, *, model: nn.Module | None = None
) -> None:
    """Load a checkpoint's weights, and what the task holds outside its model, in place.

    Args:
        task: The run's.
        bare: Its model, not wrapped.
        strategy: Loads what it splits.
        folder: The checkpoint.
        model: Another model to load the weights into.
    """
    target = bare if model is None else strategy.unwrap(model)
    load = strategy.load_model_state if target is bare else None
    # Where there are none yet, the process that holds the weights sends them.
    if not any(parameter.is_meta for parameter in target.parameters()):
        load_weights(target, folder, load=load, own=strategy.own_state(target) if load else None)
    with without_model(task):
        task.load_state_dict(load_task_state(folder, task.state_dict().keys()))
