"""One call of `Trainer.train`: set up, run the loop, act between its steps, finish."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hftrain.adapter.data import data_seed
from hftrain.adapter.plan import fit_config
from hftrain.checkpoint.layout import checkpoint_name
from hftrain.core.log import get_logger
from hftrain.core.progress import Progress
from hftrain.core.seed import capture_rng, draw_as_a_loader, restore_rng, set_seed
from hftrain.core.types import TrainOutput
from hftrain.data.feed import TrainFeed
from hftrain.data.persistent import end_workers
from hftrain.data.states import resumable_loader
from hftrain.loops.contract import check_features
from hftrain.loops.fit import FitLoop
from hftrain.loops.window import LogWindow, merge_reports
from hftrain.optim.weight_modes import evaluation_weights, training_weights
from hftrain.step.stepper import Stepper
from hftrain.task.overflow import DebugUnderflowOverflow
from hftrain.trainer.announce import announce_training
from hftrain.trainer.counting import RunCounts, samples_since, token_counter
from hftrain.trainer.debugging import watch_overflow
from hftrain.trainer.interrupts import Interrupts
from hftrain.trainer.leftovers import END_EPOCH, END_RUN, EVALUATE, SAVE, left_in
from hftrain.trainer.loop_parts import fit_parts
from hftrain.trainer.nodes import own_checkpoint
from hftrain.trainer.numerics import ModelChanges
from hftrain.trainer.reports import speed_metrics
from hftrain.trainer.salvage import Salvage
from hftrain.trainer.saving import RunCheckpoints
from hftrain.trainer.setup import loss_window, reset, set_up, start_state, tear_down
from hftrain.trainer.step_end import StepEnd

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class TrainSession:
    """Hold what exists only while a run lasts.

    Args:
        trainer: Whose hooks the loop calls; its `task.model`, `model_wrapped`, optimizer and schedule are replaced.
        resume: A checkpoint to continue from.
        ignore_keys: Outputs that evaluations leave out of the predictions.
    """

    def __init__(self, trainer: Trainer, *, resume: Path | None, ignore_keys: list[str] | None) -> None:
        self.trainer = trainer
        self.resume = resume
        self.ignore_keys = ignore_keys
        self.progress = Progress()
        strategy = trainer.strategy
        self.logs = LogWindow(gather_object=strategy.gather_object)
        self.losses = trainer._loss_window = loss_window(
            trainer.args, strategy, gather=trainer._nested_gather, is_overridden=trainer._is_overridden
        )
        self._rng: Mapping[str, Any] | None = None
        self._left: frozenset[str] = frozenset()
        self.changes = ModelChanges(trainer.args, strategy)
        self.pending: list[Callable[[], None]] = []
        self.checkpoints = RunCheckpoints(
            trainer, progress=self.progress, losses=self.losses, logs=self.logs, pending=self.pending
        )
        self.optimizer: torch.optim.Optimizer
        self._watch: DebugUnderflowOverflow | None = None
        self._loader: Any = None
        self.wrap: Callable[[nn.Module], nn.Module]
        self.step_end: StepEnd
        self.used_rate: float | None = None
        self.counts: RunCounts
        self.loop = cast(FitLoop, trainer.loops.get("fit") or FitLoop())
        self.interrupts: Interrupts
        self.salvage: Salvage
        # In words; None in a step or an evaluation.
        self.phase: str | None = "set up the training"

    def run(self) -> TrainOutput:
        """Train to the end; collective."""
        trainer, args = self.trainer, self.trainer.args
        trainer.is_in_train = True
        plan, batch_size, stepper = self._set_up()
        goal = self.checkpoints.plan
        if self.resume is not None:
            self._load_rest(self.resume)
        else:
            self.checkpoints.warn_of_others()
        self._show_parts(self.checkpoints.feed.loader)
        self.interrupts = self._make_interrupts()
        self.checkpoints.writes.start(
            self.optimizer,
            own=self.checkpoints.own_state,
            consensus=self.interrupts.consensus,
            silence=self.interrupts.silence,
        )
        announce_training(
            args,
            plan,
            batch_size=batch_size,
            progress=self.progress,
            count_parameters=trainer.get_num_trainable_parameters,
        )
        self.counts.begin()
        start_s, first = time.perf_counter(), replace(self.progress)
        trainer.task.train()
        trainer.callback_handler.fire("on_train_begin")
        config = fit_config(
            args,
            max_steps=goal.max_steps,
            num_batches=plan[5],
            num_batches_first=goal.num_batches_first,
            num_epochs=plan[0] if plan[4] else None,
            world_size=trainer.strategy.world_size,
        )
        self.phase = None
        self.salvage = self._make_salvage()
        self.step_end = StepEnd(
            trainer._maybe_log_save_evaluate,
            state=trainer.state,
            control=trainer.control,
            events=trainer.callback_handler,
            losses=self.losses,
            counts=self.counts,
            values={"model": trainer.model_wrapped, "trial": trainer._trial, "ignore_keys_for_eval": self.ignore_keys},
        )
        with self.interrupts:
            with training_weights(self.optimizer), self.salvage:
                self.loop.attach(fit_parts(self, config, self.salvage.watch(stepper)))
                self.checkpoints.loops.hand_over(self.loop)
                self.loop.run(has_left=bool(self._left), ends_epoch=END_RUN in self._left)
            self.checkpoints.settle()
            self._save_end(first)
            output = self._finish(start_s=start_s, first=first)
            self.interrupts.settle()
        return output

    def _set_up(self) -> tuple[tuple[Any, ...], int, Stepper]:
        """Build the model, open the data, plan, wrap; return the documented plan, the batch size and the step."""
        trainer, args = self.trainer, self.trainer.args
        resume = trainer.strategy.broadcast_object(None if self.resume is None else str(self.resume))
        if resume is not None:
            copy = trainer._output.own_copy(Path(resume))
            self.resume = own_checkpoint(args, trainer.strategy, trainer.output_dir, copy)
        self.checkpoints.manager.parcels = trainer._output.meet()
        if trainer.model_init is not None:
            set_seed(args.seed)
            with trainer.strategy.building():
                trainer._adopt_model(trainer.call_model_init(trainer._trial))
            trainer.optimizer = trainer.lr_scheduler = None
        loader = self.open_data().loader
        batch_size = trainer.get_total_train_batch_size(args)
        plan = trainer.set_initial_training_values(args, loader, batch_size)
        goal = self.checkpoints.plan = trainer._plan_run(self.resume, loader, plan, self.progress)
        plan = (*plan[:6], goal.max_steps)
        names = "floating_point_ops", "num_parameters"
        counts_flos = trainer._is_overridden(names[0]) or any(hasattr(trainer.model, name) for name in names)
        trainer.current_flos = 0
        self.counts = RunCounts(
            args,
            trainer.strategy,
            trainer.state,
            counter=token_counter(args, trainer.model, trainer.processing_class),
            count_flos=trainer.floating_point_ops if counts_flos else None,
            add_flos=trainer._add_flos,
        )
        start_state(trainer, self.resume, max_steps=goal.max_steps, num_epochs=plan[0])
        if self.resume is not None:
            self.checkpoints.take_over(self.resume, goal)
        if goal.is_reshaped:
            check_features(self.loop, {"reshaping": "a checkpoint of another number of processes or batch size"})
        stepper = set_up(self, goal.max_steps)
        self.checkpoints.watch(self.optimizer)
        self._watch = watch_overflow(args, trainer.model)
        return plan, batch_size, stepper

    def _make_interrupts(self) -> Interrupts:
        trainer = self.trainer
        return Interrupts(
            trainer.save_policy,
            args=trainer.args,
            strategy=trainer.strategy,
            output=trainer._output,
            state=trainer.state,
            control=trainer.control,
            progress=self.progress,
            events=trainer.callback_handler,
            pending=self.pending,
            checkpoints=self.checkpoints,
            end_step=lambda: self.loop.end_step(),
            save=self.save_now,
        )

    def _make_salvage(self) -> Salvage:
        return Salvage(
            is_asked=self.trainer.save_policy.on_exception,
            num_processes=self.trainer.strategy.world_size,
            task=self.trainer.task,
            optimizer=self.optimizer,
            progress=self.progress,
            control=self.trainer.control,
            counts=self.counts,
            checkpoints=self.checkpoints,
            save=self.save_now,
        )

    def _show_parts(self, loader: Any) -> None:
        parts = {name: getattr(self.trainer, name) for name in ("model", "optimizer", "lr_scheduler")}
        self.trainer.callback_handler.refresh(**parts, train_dataloader=loader)

    def close(self) -> None:
        """Put the unwrapped model back and mark the run as over; safe after an error."""
        trainer = self.trainer
        self.checkpoints.writes.close(is_urgent=isinstance(sys.exc_info()[1], KeyboardInterrupt))
        if self._watch is not None:
            self._watch.remove()
        self.changes.undo()
        self.checkpoints.let_go()
        self.loop.detach()
        tear_down(trainer)
        trainer.is_in_train = False
        # Workers that persist live as long as their loader, which torch's optimizers keep the frame of.
        end_workers(self._loader)
        if self._loader is not None:
            self.checkpoints.feed.close()
        trainer._past = None
        trainer.callback_handler.refresh(train_dataloader=None, eval_dataloader=None)
        trainer._loaders.clear()

    # -- set-up --------------------------------------------------------------------------------------------------

    def _load_rest(self, folder: Path) -> None:
        """Load what a checkpoint holds outside the model."""
        self._rng, self._left = self.checkpoints.load_rest(folder, self.optimizer), left_in(folder)
        reset(self.trainer.control)
        if self.trainer.args.ignore_data_skip:
            # Documented: start the epoch's data over, with random numbers as they come.
            self._rng, self.progress.micro_steps_in_epoch, self.progress.offset_in_epoch = None, 0, 0
            self.checkpoints.feed.load_state_dict(None)

    def open_data(self) -> TrainFeed:
        """Open the training data as it is set up now, in place of what was read before; collective."""
        trainer, seed = self.trainer, data_seed(self.trainer.args)
        loader = trainer._sharded(trainer.get_train_dataloader(), is_training=True)
        loader = resumable_loader(loader, seed=seed, rank=trainer.strategy.rank)
        end_workers(self._loader)
        feed = TrainFeed(loader, seed=seed)
        if trainer.strategy.world_size > 1:
            main = trainer.strategy.broadcast_object(feed.own_seeds)
            feed.own_seeds = [*main, *feed.own_seeds[len(main) :]]
        if self._loader is not None:
            feed.take_over(self.checkpoints.feed)
            trainer.callback_handler.refresh(train_dataloader=loader)
        self._loader, self.checkpoints.feed = loader, feed
        return feed

    # -- what the loop calls between steps -----------------------------------------------------------------------

    def before_epoch(self) -> None:
        """Remember the random numbers an epoch's order may be drawn from, or put the checkpoint's back."""
        if self._rng is not None and self.progress.is_within_epoch:
            # A checkpoint of another trainer does not tell what the epoch's order was drawn from.
            restore_rng(self.checkpoints.epoch_rng or dict(self._rng))
        else:
            self._load_rng()
            self.checkpoints.epoch_rng = capture_rng()
            self.trainer._past = None
        draw_as_a_loader()

    def _load_rng(self) -> None:
        if self._rng is not None:
            self.trainer._load_rng_state(str(self.resume))
            self._rng = None

    def restore_rng(self) -> bool:
        """Put back the checkpoint's random numbers, do what its run had left to do, and tell if that ends the epoch."""
        self._load_rng()
        control, left = self.trainer.control, self._left
        self._left = frozenset()
        if EVALUATE in left and self.trainer.args.eval_strategy != "no":
            self.evaluate()
            if SAVE in left or control.should_save:
                control.should_save = False
                self.save_now()
        control.should_epoch_stop = control.should_epoch_stop or END_EPOCH in left
        return bool(left) and (control.should_epoch_stop or control.should_training_stop)

    def restore_numbers(self) -> None:
        """Put the checkpoint's random numbers back, if there are any left to put back."""
        if self._rng is not None:
            restore_rng(dict(self._rng))

    def log(self, logs: dict[str, Any]) -> None:
        """Log the losses, and what the precision, the steps and the metrics have to add."""
        self.counts.read()
        self.trainer.store_flos()
        self.checkpoints.untrained.check_unfrozen()
        own = {name: float(value) for name, value in self.trainer._read_metrics().items()}
        if self.trainer._is_overridden("_get_learning_rate"):
            self.used_rate = logs["learning_rate"]
            logs["learning_rate"] = self.trainer._get_learning_rate()
            self.used_rate = None
        self.trainer._slot_log(merge_reports(logs, self.trainer.precision.logs(), self.logs.read(), own))

    def evaluate(self) -> None:
        """Evaluate as a cadence or a callback asked for it; collective."""
        trainer = self.trainer
        metrics = trainer._evaluate(trainer._trial, self.ignore_keys)
        is_best = trainer._determine_best_metric(metrics, trainer._trial)
        if trainer.args.save_strategy == "best" and is_best:
            trainer.control.should_save = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Note that an error within is one of the evaluation, with which the run is to resume."""
        self.counts.read()
        self.salvage.is_evaluating = True
        yield
        self.salvage.is_evaluating = False

    def save_now(self) -> None:
        """Save through the hook, which an override may replace; collective."""
        # Named here too: an override may wait for other processes before it calls the method it replaces.
        self.phase = f"save {checkpoint_name(self.trainer.state.global_step)}"
        self.trainer._save_checkpoint(self.trainer.model_wrapped, self.trainer._trial)
        self.phase = None

    def save(self) -> None:
        """Commit a checkpoint; collective."""
        self.interrupts.note_save()
        self.phase = f"save {checkpoint_name(self.trainer.state.global_step)}"
        self.counts.read()
        self.trainer.store_flos()
        with evaluation_weights(self.optimizer):
            self.changes.save(lambda: self.checkpoints.save(self.optimizer))
        self.phase = None

    # -- the end -------------------------------------------------------------------------------------------------

    def _save_end(self, first: Progress) -> None:
        """Save what no event has: a run that the evaluation of the last epoch's end has stopped."""
        has_trained = self.progress.step > first.step
        is_saved = self.checkpoints.tried_step == self.progress.step
        if self.trainer.args.save_strategy == "steps" and has_trained and not is_saved:
            self.save_now()
            self.checkpoints.settle()

    def _finish(self, *, start_s: float, first: Progress) -> TrainOutput:
        trainer, self.phase = self.trainer, "finish the training"
        self.checkpoints.own.close(is_complete=True)
        self.checkpoints.untrained.check_unfrozen()
        self.losses.read()
        self.counts.read()
        trainer.store_flos()
        training_loss = self.losses.mean_over_run()
        num_nonfinite = self.losses.num_nonfinite
        metrics = speed_metrics(
            "train",
            start_s,
            num_samples=samples_since(first, self.progress, trainer.strategy),
            num_steps=self.progress.step - first.step,
            num_tokens=self.counts.session_tokens(),
        )
        logger.info("Training completed.")
        trainer.task.model = trainer.model
        if trainer.args.load_best_model_at_end:
            trainer._load_best_model()
        metrics["total_flos"] = trainer.state.total_flos
        metrics["train_loss"] = training_loss
        if num_nonfinite:
            metrics["nonfinite_losses"] = num_nonfinite
        trainer.is_in_train = False
        trainer._report_memory(metrics)
        trainer._slot_log(metrics)
        best = self.checkpoints.best()
        # SavePolicy(keep_best=1) asks for the newest next to the best one.
        with_newest = trainer.save_policy.keep_best is not None and not trainer.args.load_best_model_at_end
        keeps_one = trainer.args.save_total_limit == 1 and trainer.save_policy.keep_best in (None, 1)
        if keeps_one and not with_newest and best is not None:
            self.checkpoints.manager.keep_only(best)
        trainer.callback_handler.fire("on_train_end")
        trainer._output.publish_quietly()
        if trainer.args.push_to_hub:
            trainer._hub.after_training()
        return TrainOutput(trainer.state.global_step, training_loss, metrics)
