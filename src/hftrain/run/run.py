"""One training run: run the loop, act between its steps, and finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hftrain.adapter.data import syncs_each_batch
from hftrain.arguments.processes import changed_settings
from hftrain.checkpoint.fitting import restoring
from hftrain.checkpoint.writer import saves_at_all
from hftrain.core.devices import empty_cache
from hftrain.core.extras import extra
from hftrain.core.log import get_logger, warn_once
from hftrain.core.metrics import merge_reports, speed_metrics
from hftrain.core.preserve import temporarily
from hftrain.core.signatures import call_with
from hftrain.core.state import Progress, check_flags
from hftrain.core.types import TrainOutput
from hftrain.loops.fit import FitConfig, FitHooks, FitParts
from hftrain.loops.window import as_numbers
from hftrain.optim.schedules import follows_metric
from hftrain.preemption.grace import GracePeriod
from hftrain.run.contents import END_EPOCH, END_RUN, EVALUATE, LOG, SAVE
from hftrain.run.counting import RunCounts, samples_since
from hftrain.run.interrupts import Interrupts
from hftrain.run.journal import environment
from hftrain.run.parts import RunParts
from hftrain.run.plan import RunPlan, announce_training, check_rounds
from hftrain.run.ready import check_not_replaced, flag_check
from hftrain.run.saving import Saver
from hftrain.task.modes import training_weights

logger = get_logger(__name__)


class Run:
    """One training run, from a checkpoint or the start to its end."""

    def __init__(
        self,
        parts: RunParts,
        *,
        plan: RunPlan,
        counts: RunCounts,
        saver: Saver,
        checks: Any,
        grace: GracePeriod,
        resume: Path | None,
    ) -> None:
        self._parts, self._plan = parts, plan
        self.progress, self.logs, self.counts = parts.progress, parts.logs, counts
        self.saver, self.contents = saver, saver.contents
        self._resume, self._checks = resume, checks
        on_exception = parts.save_policy.on_exception
        self._salvage = extra("salvage").Salvage(parts, counts, saver) if on_exception else None
        self._interrupts = Interrupts(parts, saver, grace)

    def run(self) -> TrainOutput:
        """Train to the end; collective."""
        parts, events, trainer = self._parts, self._parts.events, self._parts.trainer
        if self._resume is None:
            self.saver.warn_of_others()
        else:
            with restoring(self._resume):
                self.contents.restore(self._resume)
        for flag in vars(parts.control):
            setattr(parts.control, flag, False)  # a run that was stopped is resumed to continue
        events.refresh(
            model=parts.model,
            optimizer=parts.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            train_dataloader=parts.data.feed.loader,
        )
        self.saver.start(consensus=self._interrupts.consensus, silence=self._interrupts.silence)
        announce_training(parts, self._plan)
        self._begin_journal()
        self.counts.begin()
        start_s, first_progress, self._start_time = time.perf_counter(), replace(self.progress), time.time()
        parts.task.train()
        self._originals, self._check_flags = (trainer.optimizer, trainer.lr_scheduler), flag_check(parts)
        events.fire("on_train_begin")
        check_not_replaced(trainer, self._originals)
        self._checks.begin()
        self.contents.objects.begin()
        parts.phase = None
        pending = self.contents.pending
        with self._interrupts:
            with training_weights(parts.optimizer), self._salvage or nullcontext():
                parts.loop.attach(self._wrapped_parts())
                self.contents.loops.hand_over(parts.loop)
                parts.loop.run(has_left=bool(pending), ends_epoch=END_RUN in pending)
            self.saver.writer.finish()
            self._save_end(first_progress)
            output = self._finish(start_s=start_s, first_progress=first_progress)
            self._interrupts.stop_if_asked_late()
        return output

    def _begin_journal(self) -> None:
        """Append the start of the run to the journal; a run that never saves has no journal."""
        parts, plan = self._parts, self._plan
        if saves_at_all(parts.args, parts.save_policy):
            log_history, resume = parts.state.log_history or [], self._resume
            # The log of another folder's run is not in this journal.
            is_same_folder = resume is None or resume.resolve().parent == parts.output.folder.resolve()
            parts.journal.begin(
                parts.output,
                parts.strategy,
                self.progress,
                resumed_from=None if resume is None else resume.name,
                num_logged=len(log_history),
                **({} if is_same_folder else {"earlier": log_history}),
                arguments=changed_settings(parts.args.to_dict(), type(parts.args)),
                plan={
                    "max_steps": plan.max_steps,
                    "num_examples": plan.length.num_examples,
                    "total_batch_size": plan.total_batch_size,
                    **({"limits": limits} if (limits := parts.trainer.limits.facts) else {}),
                },
                environment=environment(parts.strategy) | {"precision": parts.precision.policy.name},
                model=type(parts.model).__name__,
                task=type(parts.task).__name__,
                **(extra("record").origin_of(parts) if parts.strategy.is_main else {}),
            )

    def _wrapped_parts(self) -> FitParts:
        """Return the parts for the training loop, as the callbacks with `wrap_parts` change them."""
        fit = self._fit_parts()
        if self._salvage is not None:
            fit = self._salvage.watch(fit)
        for wrap in self._parts.events.at_point("wrap_parts"):
            fit = wrap(fit)
        return fit

    def _fit_parts(self) -> FitParts:
        parts, plan, args, trainer = self._parts, self._plan, self._parts.args, self._parts.trainer
        schedule, accumulation = trainer.lr_scheduler, args.gradient_accumulation_steps
        take, training_step = parts.services.step_functions(self._resume, parts.logs)
        evaluates_first = args.eval_on_start or trainer.limits.sanity_eval_batches
        return FitParts(
            config=FitConfig(
                max_steps=plan.max_steps,
                num_epochs=plan.length.num_epochs if plan.length.is_by_epochs else None,
                accumulation=accumulation,
                num_batches=plan.length.num_batches,
                world_size=parts.strategy.data.world_size,
                empty_cache_every=args.torch_empty_cache_steps,
            ),
            hooks=FitHooks(
                get_batch_samples=self.counts.watching(take),
                training_step=training_step,
                before_epoch=self.contents.begin_epoch,
                restore_rng=self._finish_resume,
                log=self._log,
                evaluate=self._evaluate,
                save=self.saver.save,
                evaluate_first=self._evaluate_first if evaluates_first else None,
                empty_cache=empty_cache,
                rewind=self.contents.rewind.between_steps(self.saver.writer.finish),
                make_feed=parts.data.replace,
                evaluate_on=lambda dataset, prefix: trainer.evaluate(dataset, parts.ignore_keys, prefix),
                act=self._call_override if parts.hooks.is_overridden("_maybe_log_save_evaluate") else None,
                mark_sync=parts.services.mark_sync if accumulation > 1 else None,
                pass_length=lambda: plan.pass_length(parts.data.feed),
                # An override may join or split batches.
                check_pass=None if parts.hooks.is_overridden("get_batch_samples") else self._check_pass,
                check_flags=self._check_flags,
                read_rate=parts.hooks.get_learning_rate if parts.hooks.is_overridden("_get_learning_rate") else None,
            ),
            feed=parts.data.feed,
            dataset=trainer.train_dataset,
            stepper=parts.stepper,
            model=parts.wrapped,
            optimizer=parts.optimizer,
            schedule=None if follows_metric(schedule) else schedule,
            no_sync=nullcontext if syncs_each_batch(args) else parts.strategy.no_sync,
            device=parts.strategy.device,
            progress=self.progress,
            state=parts.state,
            control=parts.control,
            events=parts.events,
            losses=parts.losses,
            pending=parts.pending,
        )

    # -- what the loop calls between steps -----------------------------------------------------------------------

    def _check_pass(self, num_read: int, num_batches: int) -> None:
        extra("shares").check_pass(self._parts.data.feed.loader, num_read, num_batches)

    def _check_length(self) -> None:
        """Check the length of the open pass, on this rank and the others. Collective."""
        parts, plan = self._parts, self._plan
        num_batches, planned = plan.pass_length(parts.data.feed), plan.length.num_batches
        if plan.length.is_by_epochs and num_batches and planned and num_batches > planned:
            warn_once(
                f"A pass had {planned} batches when the run began, and has {num_batches} now: the run still ends after "
                f"the {plan.max_steps} updates that were planned. Set max_steps to train longer."
            )
        if parts.strategy.world_size > 1:
            num_left = None if num_batches is None else num_batches - self.progress.micro_steps_in_epoch
            check_rounds(parts, num_left, num_left=plan.max_steps - self.progress.step)

    def _call_override(self, act: Callable[[], None], grad_norm: Any, learning_rate: Any) -> None:
        """Call the override of `_maybe_log_save_evaluate` at the end of a step or an epoch.

        It may call the base method, which does `act`, or log, evaluate and save itself as the documented one does. Its
        `tr_loss` is the open logging window itself, so ``tr_loss -= tr_loss`` starts a new one, and the events that it
        fires reset their flags.
        """
        parts, self._act = self._parts, act  # for `act_from_override`
        losses: Any = parts.losses  # live, as for every run with this override
        if parts.control.should_log:
            self.counts.read()
            # The norm of an engine, or a sharded one, is not a plain tensor.
            grad_norm = None if grad_norm is None else as_numbers(grad_norm)[0]
        # In the documented order, because an override may take them by position.
        values = {
            "tr_loss": losses.open_sum(),
            "grad_norm": grad_norm,
            "model": self._parts.wrapped,
            "trial": parts.hooks.trial,
            "epoch": parts.state.epoch,
            "ignore_keys_for_eval": parts.ignore_keys,
            "start_time": self._start_time,
            "learning_rate": learning_rate,
        }
        with temporarily(parts.events, answers=True):
            call_with(parts.hooks.maybe_log_save_evaluate, values)

    def act_from_override(self, loss: torch.Tensor | None) -> None:
        """Do what callbacks requested; called by the base method of the override, with the loss to log."""
        parts = self._parts
        losses: Any = parts.losses
        parts.events.answers = False
        losses.logged_sum = loss
        self._act()
        losses.logged_sum = None
        parts.events.answers = True

    def _finish_resume(self) -> bool:
        """Restore the checkpoint's random numbers, do what was still due, and tell whether that ends the epoch."""
        self._check_length()
        self.contents.load_rng_through_hook()
        control, pending = self._parts.control, self.contents.pending
        self.contents.pending = frozenset()
        if LOG in pending:
            control.should_log = True
            self._parts.loop.end_step()
        if EVALUATE in pending and self._parts.args.eval_strategy != "no":
            self._evaluate()
            if SAVE in pending or control.should_save:
                self.saver.save()
        control.should_epoch_stop = control.should_epoch_stop or END_EPOCH in pending
        return bool(pending) and (control.should_epoch_stop or control.should_training_stop)

    def _log(self, logs: dict[str, Any]) -> None:
        parts = self._parts
        self.counts.store()
        self._checks.check_between_steps()
        check_not_replaced(parts.trainer, self._originals)
        check_flags(parts.control)
        task_metrics = {name: float(value) for name, value in parts.services.read_metrics().items()}
        task_metrics |= getattr(self._parts.optimizer, "logs", dict)()
        parts.hooks.log(merge_reports(logs, parts.precision.logs(), parts.logs.read(), task_metrics))
        self._check_flags("on_log")

    def _evaluate(self) -> None:
        """Evaluate on request of an interval or a callback; collective."""
        parts = self._parts
        with parts.journal.paused():
            metrics = parts.hooks.evaluate_in_training(parts.hooks.trial, parts.ignore_keys)
        self._check_flags("on_evaluate")
        # Rank 0's metric decides on every rank, which needs no check.
        is_best = parts.hooks.determine_best_metric(metrics, parts.hooks.trial)
        if parts.args.save_strategy == "best" and is_best:
            parts.control.should_save = True

    def _evaluate_first(self) -> None:
        """Evaluate before training; neither the best metric nor a schedule depends on it. Collective."""
        parts, trainer = self._parts, self._parts.trainer
        with parts.journal.paused():
            if trainer.limits.sanity_eval_batches:
                parts.services.try_evaluation()
            if parts.args.eval_on_start:
                parts.hooks.evaluate_in_training(parts.hooks.trial, parts.ignore_keys, skip_scheduler=True)

    @contextmanager
    def marked_as_evaluation(self) -> Iterator[None]:
        """Mark errors within as errors of the evaluation, with which a resumed run starts."""
        self.counts.read()
        self._parts.is_evaluating = True
        yield  # no `finally`: after an error the salvage still asks what failed
        self._parts.is_evaluating = False

    # -- the end -------------------------------------------------------------------------------------------------

    def _save_end(self, first_progress: Progress) -> None:
        """Save at the end if no event has: the evaluation at the end of the last epoch may have stopped the run."""
        has_trained = self.progress.step > first_progress.step
        is_saved = self.saver.tried_step == self.progress.step
        if self._parts.args.save_strategy == "steps" and has_trained and not is_saved:
            self.saver.save()
            self.saver.writer.finish()

    def _finish(self, *, start_s: float, first_progress: Progress) -> TrainOutput:
        parts, args, state, trainer = self._parts, self._parts.args, self._parts.state, self._parts.trainer
        parts.phase = "finish the training"
        self.contents.objects.close(is_complete=True)
        self._checks.check_between_steps()
        check_not_replaced(trainer, self._originals)
        parts.losses.read()
        self.counts.store()
        training_loss, num_nonfinite = parts.losses.mean_over_run(), parts.losses.num_hidden
        metrics = speed_metrics(
            "train",
            start_s,
            num_samples=samples_since(first_progress, self.progress, parts.strategy.data),
            num_steps=self.progress.step - first_progress.step,
            num_tokens=self.counts.num_tokens() if args.include_tokens_per_second else None,
        )
        logger.info("Training completed.")
        # What follows has rank 0's running statistics on every rank, as the saved model has.
        parts.strategy.for_evaluation(parts.wrapped)
        parts.strategy.after_evaluation(parts.wrapped)
        parts.task.model = parts.model
        if args.load_best_model_at_end:
            parts.hooks.load_best_model()
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = training_loss
        if num_nonfinite:
            metrics["nonfinite_losses"] = num_nonfinite
        trainer.is_in_train = False
        parts.services.report_memory(metrics)
        parts.hooks.log(metrics)
        self.saver.keep_only_best()
        parts.events.fire("on_train_end")
        if any(getattr(callback, "shows_summary", False) for callback in parts.events.callbacks):
            extra("summary").show_summary(parts, self.saver, metrics, first=first_progress, resume=self._resume)
        parts.output.publish_quietly()
        return TrainOutput(state.global_step, training_loss, metrics)
