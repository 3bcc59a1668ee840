"""Trainer methods called between the steps of a run: save, load, log, evaluate."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.adapter.plan import TrainPlan
from hftrain.callbacks import TrainerCallback
from hftrain.core.errors import TaskError
from hftrain.core.preserve import preserved
from hftrain.evaluation.running import used_in_evaluation
from hftrain.loops.contract import check_features
from hftrain.rules.loops import used_in_training
from hftrain.rules.saving import check_fits
from hftrain.rules.training import Given, check_ahead
from hftrain.run.best import follow_metric
from hftrain.run.plan import find_resume
from hftrain.run.saving import load_task
from hftrain.run.writing import saves_at_all
from hftrain.trainer.evaluation_methods import EvaluationMethods
from hftrain.trainer.numerics import check_training
from hftrain.trainer.rehearsal import without_trackers
from hftrain.trainer.searching import TrialRun, trying


class RunMethods(EvaluationMethods):
    """Save, load, log and evaluate between the steps of a run."""

    def _check_training(self, resume: str | bool | None) -> Path | None:
        """Raise for a training that cannot work, before anything is launched; return the checkpoint to resume from."""
        self._check_data()
        if saves_at_all(self.args, self.save_policy):
            self._output.check_writable()
        self._check_optimizer()
        check_training(self.args, self.strategy, self.model, compiles=self.compiler.config is not None)
        self.strategy.check_model(self.model)
        self._check_ahead()
        parts = self.args, self.strategy, self._output, self._make_manager
        folder = find_resume(*parts, resume, writes_itself=self._is_overridden("_save_checkpoint"))
        self._check_loop(folder)
        check_fits(self.model, folder, is_split=self.get_tp_size() > 1, is_overridden=self._is_overridden)
        return folder

    def _check_ahead(self) -> None:
        """Raise for a training that would fail late; see `check_ahead`."""

        def count_steps(loader: Any) -> int:
            total = self.get_total_train_batch_size(self.args)
            return TrainPlan(*self.set_initial_training_values(self.args, loader, total)).max_steps

        data = self.train_dataset, self.eval_dataset, self._eval_sets, self.data_collator, self.label_names
        functions = self.compute_metrics, self.preprocess_logits_for_metrics, self.compute_loss_func
        given = Given(*data, *functions, self.callback_handler.callbacks, self._is_overridden, count_steps)
        rate = (self.optimizer_cls_and_kwargs or (None, {}))[1].get("lr", self.args.learning_rate)
        optimizers = (self.optimizer, self.lr_scheduler)
        parts = self.args, self.strategy, self.task, self.model
        check_ahead(*parts, given, optimizers=optimizers, learning_rate=rate, spill_dir=self.spill_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Commit a checkpoint of the running session; called by the loop when callbacks request a save."""
        self._running_session("_save_checkpoint").save()

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Delete the oldest checkpoints, by commit order, beyond `save_total_limit`; called after each save."""
        self._running_session("_rotate_checkpoints").rotate()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the state of optimizer and schedule into a checkpoint; collective."""
        self._running_session("_save_optimizer_and_scheduler").checkpoints.write_optimizer(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        """Load the files of `_save_optimizer_and_scheduler`; called on resume. Collective."""
        self._running_session("_load_optimizer_and_scheduler").checkpoints.read_optimizer(Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model in place; called on resume and for the best model."""
        load_task(self.task, self.model, self.strategy, Path(resume_from_checkpoint), model=model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random number generators from a checkpoint; called on resume, once the data is open."""
        self._running_session("_load_rng_state").restore_numbers()

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights; called at the end of a run with `load_best_model_at_end`."""
        self._running_session("_load_best_model").checkpoints.load_best()

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor | None = None,
        grad_norm: Any = None,
        model: nn.Module | None = None,
        trial: Any = None,
        epoch: float | None = None,
        ignore_keys_for_eval: list[str] | None = None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save as callbacks requested, after each step and epoch.

        The arguments give an override the progress of the run. `tr_loss` is the sum of the step losses since the last
        log. The value passed to this method is divided by the steps and logged. An override that logs itself resets
        `tr_loss` in place and sets `_globalstep_last_logged`, as the documented method does.
        """
        session = self._running_session("_maybe_log_save_evaluate")
        if self._is_overridden("_maybe_log_save_evaluate"):
            session.step_end.act(tr_loss)

    @property
    def _globalstep_last_logged(self) -> int:
        """The update after which the training loss was last logged, for overrides of `_maybe_log_save_evaluate`."""
        return self.state.global_step - (self._loss_window.num_steps if self._loss_window else 0)

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        if self._loss_window is not None:
            self._loss_window.leave(self.state.global_step - step)

    @property
    def _total_loss_scalar(self) -> float:
        """The sum of all logged step losses, for overrides; `train_loss` is computed from it."""
        return self._loss_window.run_total if self._loss_window else 0.0

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, total: float) -> None:
        if self._loss_window is not None:
            self._loss_window.run_total = total

    def _evaluate(
        self, trial: Any = None, ignore_keys_for_eval: list[str] | None = None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate during training, and step a schedule that depends on the metric unless `skip_scheduler` is set."""
        session = self._running_session("_evaluate")
        with session.evaluating():
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if not skip_scheduler:
            follow_metric(self.lr_scheduler, self.args, self.state, metrics, has_all_sets=self._has_all_sets)
        return metrics

    def _report_to_hp_search(self, trial: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Report the objective of an evaluation during training to the search backend, which may end the trial."""
        # Evaluation sets may have different schedules, but the objective needs all of them.
        if self._trial_run is not None and self._has_all_sets:
            folder = self._get_output_dir(self._trial)
            self._trial_run.note(metrics, step=step, folder=folder, events=self.callback_handler)

    def _determine_best_metric(self, metrics: Mapping[str, Any], trial: Any = None) -> bool:
        """Record the best evaluation so far in the state; return whether this one is the best."""
        session = self._running_session("_determine_best_metric")
        return session.checkpoints.metric.note(metrics, has_all_sets=self._has_all_sets)

    def _check_loop(self, resume: Path | None) -> None:
        """Raise if the run uses a feature that a loop does not support."""
        if "fit" in self.loops:
            dataset = None if self._is_overridden("get_train_dataloader") else self.train_dataset
            parts = self.args, self.strategy, self.precision, self.save_policy
            check_features(self.loops["fit"], used_in_training(*parts, dataset=dataset, resume=resume))
        if "evaluate" in self.loops and self.args.eval_strategy != "no":
            is_mapping = isinstance(self.eval_dataset, Mapping)
            for dataset in self.eval_dataset.values() if is_mapping else [self.eval_dataset]:
                is_per_batch = self.args.batch_eval_metrics and self.compute_metrics is not None
                used = used_in_evaluation(
                    self.args, self.strategy, dataset=dataset, takes_turns=False, is_per_batch=is_per_batch
                )
                check_features(self.loops["evaluate"], used)

    @contextmanager
    def _trying(self, trial: Any, **options: Any) -> Iterator[TrialRun]:
        """Train with a trial's values; see `trying`."""
        noise, given = self.neftune_noise_alpha, self.args.neftune_noise_alpha
        try:
            with trying(self.args, self._output, self.model_init, trial, **options) as run:
                if self.args.neftune_noise_alpha != given:
                    self.neftune_noise_alpha = self.args.neftune_noise_alpha
                self._trial_run, self.hp_name = run, options.get("hp_name")
                self._follow_arguments()
                yield run
        finally:
            self._trial_run, self.neftune_noise_alpha = None, noise
            self._follow_arguments()

    def _make_own_accelerator(self) -> None:
        """Call an override that makes the accelerator: it may set what its class uses elsewhere."""
        if self._is_overridden("create_accelerator_and_postprocess"):
            self.create_accelerator_and_postprocess()

    def _follow_arguments(self) -> None:
        """Update objects that were made from the arguments, after these have changed."""
        self._computing.accelerator = None
        self._make_own_accelerator()
        if self.is_deepspeed_enabled:
            self.propagate_args_to_deepspeed()

    @contextmanager
    def _copies(self, folder: Path, director: TrainerCallback) -> Iterator[None]:
        """Train copies, into another folder and with an extra callback; restore all attributes afterwards."""
        handler, callbacks = self.callback_handler, list(self.callback_handler.callbacks)
        try:
            with preserved(self, self.args, self.state, self.control, *callbacks):
                self._copy_parts()
                self.args.output_dir, self.args.push_to_hub = str(folder), False
                # With fast_dev_run the constructor added no trackers, but a memory estimate may still have them.
                handler.callbacks[:] = [*without_trackers(callbacks), director]
                handler.refresh(model=self.model, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler)
                yield
        finally:
            handler.callbacks[:] = callbacks
            handler.refresh(model=self.model, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler)

    def _copy_parts(self) -> None:
        """Copy model, optimizer, schedule and loops together because they refer to each other."""
        try:
            if self.model_init is not None:
                self.loops = copy.deepcopy(self.loops)
                return
            self.task, self._outermost, self.optimizer, self.lr_scheduler, self.loops = copy.deepcopy(
                (self.task, self._outermost, self.optimizer, self.lr_scheduler, self.loops)
            )
        except Exception as error:
            held = ", its optimizer or its loop" if self.loops else " or its optimizer"
            raise TaskError(
                f"Cannot use fast_dev_run={self._num_rehearsed}.",
                f"It trains a copy, and {type(self.model).__name__}{held} cannot be copied: {error!r}.",
                "Pass model_init=, a function that makes the model, or leave fast_dev_run out.",
            ) from error
        self.model, self.model_wrapped = self.task.model, self._outermost
