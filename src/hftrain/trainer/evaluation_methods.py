"""Trainer methods that evaluate and predict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hftrain.adapter.configs import full_eval_dtype
from hftrain.core.log import refusing_broadcast, sharing_verbosity, warn_once
from hftrain.core.seed import preserved_rng
from hftrain.core.speed import speed_metrics
from hftrain.core.types import EvalLoopOutput, PredictionOutput, StepOutput
from hftrain.data.eval_sets import EvalSet, is_due, split_eval_sets
from hftrain.data.workers import report_worker
from hftrain.evaluation.generating import generates, keeps_cache
from hftrain.evaluation.ready import ready
from hftrain.evaluation.recurrence import read_memory
from hftrain.evaluation.running import evaluation_hooks, may_talk, run_evaluation
from hftrain.evaluation.tracing import JitModel, trace_model
from hftrain.loops.evaluate import EvaluateHooks
from hftrain.optim.weight_modes import evaluation_weights
from hftrain.rules.evaluation import check_evaluating
from hftrain.rules.mistakes import explain_mistake
from hftrain.run.announce import announce_evaluation
from hftrain.run.setup import place_task
from hftrain.run.whereabouts import report_late_ranks, whereabouts
from hftrain.task.metric_state import read_metrics, warn_of_unread, warn_of_unreported
from hftrain.task.model_call import to_float32
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, as_step_output
from hftrain.trainer.evaluation_mean import EvaluationMean
from hftrain.trainer.reports import to_plain, with_prefix
from hftrain.trainer.step_methods import StepMethods


class EvaluationMethods(StepMethods):
    """Evaluate and predict."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Run an evaluation, log its metrics and return them, each name prefixed; collective.

        Args:
            eval_dataset: A dataset, a dict of them, or the name of one of `self.eval_dataset`; None takes them all.
            ignore_keys: Outputs to leave out of the predictions.
            metric_key_prefix: Prefix of the metric names.

        Returns:
            Loss (the mean over items), metrics, runtime in seconds and rates, and the epoch.

        Source: the documented `Trainer.evaluate`.
        """
        is_own = eval_dataset is None
        datasets = self.eval_dataset if is_own else eval_dataset
        if isinstance(datasets, Mapping):
            datasets, sets = split_eval_sets(datasets)
            sets, metrics = self._eval_sets if is_own else sets, {}
            for name in filter(lambda name: self._is_due(sets.get(name)), datasets):
                # Passed by name, so that an override of `get_eval_dataloader` sees the name.
                chosen = name if is_own else datasets[name]
                with self._own_metrics(sets.get(name)):
                    metrics.update(self.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        chosen = self._eval_sets.get(eval_dataset) if isinstance(eval_dataset, str) else None
        with self._own_metrics(chosen), self._evaluating("eval"):
            _, metrics = self._run_over(
                self.get_eval_dataloader(eval_dataset),
                description="Evaluation",
                prediction_loss_only=True if self.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
            self._slot_log(metrics)
            if self.state.epoch is not None:
                metrics["epoch"] = self.state.epoch
            self.callback_handler.fire("on_evaluate", metrics=metrics)
            self._report_memory(metrics)
        return metrics

    def _is_due(self, entry: EvalSet | None) -> bool:
        """Return whether an evaluation set is part of the current evaluation."""
        is_asked_for = self._run_parts is None or bool(self._num_rehearsed)
        return is_asked_for or is_due(entry, self.state, by_epoch=self.args.eval_strategy == "epoch")

    @property
    def _has_all_sets(self) -> bool:
        return all(map(self._is_due, self._eval_sets.values()))

    @contextmanager
    def _own_metrics(self, entry: EvalSet | None) -> Iterator[None]:
        """Replace `compute_metrics` by an evaluation set's own metrics temporarily."""
        previous = self.compute_metrics
        if entry is not None and entry.metrics is not None:
            self.compute_metrics = entry.metrics  # type: ignore[assignment]
        try:
            yield
        finally:
            self.compute_metrics = previous

    def predict(
        self, test_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return predictions in dataset order, with labels and metrics if the data has labels; collective.

        Args:
            test_dataset: The data to predict on; required.
            ignore_keys: Outputs to leave out of the predictions.
            metric_key_prefix: Prefix of the metric names.

        Returns:
            (predictions, label_ids, metrics); NumPy arrays or tuples of them, padded with -100 if lengths differ. A
            TaskModule's `prediction_step` returns predictions only.

        Source: the documented `Trainer.predict`.
        """
        with self._evaluating("predict"):
            output, metrics = self._run_over(
                self.get_test_dataloader(test_dataset),
                description="Prediction",
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
            self.callback_handler.fire("on_predict", metrics=metrics)
            self._report_memory(metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def _run_over(
        self, loader: Any, *, metric_key_prefix: str, **options: Any
    ) -> tuple[EvalLoopOutput, dict[str, Any]]:
        """Call the documented loop on this rank's share of a loader; return its output, and its metrics with speed."""
        loader = self._sharded(loader, is_training=False)
        start_s = time.perf_counter()
        loop = self.prediction_loop if self.args.use_legacy_prediction_loop else self.evaluation_loop
        output = loop(loader, metric_key_prefix=metric_key_prefix, **options)
        # An override in the older style returns a PredictionOutput, which has no sample count.
        num_samples, num_steps = getattr(output, "num_samples", None), None
        if num_samples is not None:
            num_steps = math.ceil(num_samples / (self.args.eval_batch_size * self.strategy.world_size))
        # Tracing happens once and must not count towards the speed.
        start_s += output.metrics.get(f"{metric_key_prefix}_jit_compilation_time", 0.0)
        rates = speed_metrics(metric_key_prefix, start_s, num_samples=num_samples, num_steps=num_steps)
        return output, {**output.metrics, **rates}

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader; shared by `evaluate` and `predict`; collective.

        Args:
            dataloader: This rank's batches.
            description: Text of the progress bar.
            prediction_loss_only: Keep no predictions; None uses the arguments' setting.
            ignore_keys: Outputs to leave out of the predictions.
            metric_key_prefix: Prefix of the metric names.

        Source: the documented `Trainer.evaluation_loop`.
        """
        if self._stage == "train":
            # Called by the user, a callback or an override of `evaluate`: the model is not prepared yet.
            with self._evaluating("eval"):
                return self.evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        announce_evaluation(
            dataloader,
            description=description,
            batch_size=self.args.eval_batch_size,
            count_samples=self.num_examples,
        )
        self.callback_handler.refresh(eval_dataloader=dataloader)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        jit = JitModel(self.torch_jit_model_eval, self.task.model) if self.args.jit_mode_eval else None
        output = run_evaluation(
            dataloader,
            self._evaluation_hooks(loss_only, ignore_keys, jit),
            args=self.args,
            model=self.model,
            strategy=self.strategy,
            events=self.callback_handler,
            loops=self.loops,
            loss_only=loss_only,
            spill_dir=self.spill_dir,
            is_prediction=self._stage == "predict",
        )
        metrics = to_plain(with_prefix(output.metrics, metric_key_prefix))
        if jit is not None and jit.compilation_s is not None:
            metrics[f"{metric_key_prefix}_jit_compilation_time"] = jit.compilation_s
        return output._replace(metrics=metrics)

    def _evaluation_hooks(self, loss_only: bool, ignore_keys: list[str] | None, jit: JitModel | None) -> EvaluateHooks:
        plain = self.task if isinstance(self.task, ModelTask) else None
        self._eval_mean = None if plain is None else EvaluationMean(plain, self.strategy, self._shares)

        def step(model: nn.Module, batch: Any) -> StepOutput:
            loss, outputs, labels = self.prediction_step(model, batch, loss_only, ignore_keys)
            return StepOutput(loss=loss, outputs=outputs, labels=labels, logs=self._eval_logs)

        compute_metrics = None if loss_only else self.compute_metrics
        steps_talk = may_talk(
            self.strategy,
            self.task,
            generates=generates(self.args),
            has_accelerator=self._computing.accelerator is not None,
            is_per_batch=self.args.batch_eval_metrics and compute_metrics is not None,
            is_overridden=self._is_overridden,
        )
        return evaluation_hooks(
            self.task,
            self.strategy,
            step=step,
            steps_talk=steps_talk,
            mean=self._eval_mean,
            read_metrics=self._read_metrics,
            jit=jit,
            is_prediction=self._stage == "predict",
            compute_metrics=compute_metrics,
            preprocess_logits=self.preprocess_logits_for_metrics,
            finish_outputs=self._find_filler(),
        )

    def _find_filler(self) -> Callable[[Any], Any] | None:
        """Return a function to apply to the collected outputs, or None; overridden by a Trainer that generates."""
        return None

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader; called by `evaluate` and `predict` with `use_legacy_prediction_loop`.

        This is the older name of `evaluation_loop`, for subclasses that override it; results are identical.

        Source: the documented `Trainer.prediction_loop`.
        """
        return EvaluationMethods.evaluation_loop(
            self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    def torch_jit_model_eval(self, model: nn.Module, dataloader: Any, training: bool = False) -> nn.Module:
        """Return the model traced with the first batch of a loader; if tracing fails, warn and return it unchanged.

        Args:
            model: In evaluation mode.
            dataloader: Its first batch is the example.
            training: True returns the model as it is.

        Source: the documented `jit_mode_eval`.
        """
        if training:
            return model
        context = self.compute_loss_context_manager
        return trace_model(model, dataloader, prepare=self._prepare_inputs, context=context)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, outputs and labels of one batch (each may be None), without gradients.

        Source: the documented `Trainer.prediction_step`.
        """
        inputs = self._prepare_inputs(inputs)
        task = self.task
        count, mean = self._shares.count_for_evaluation(inputs), self._eval_mean
        if mean is not None:
            mean.open(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            if isinstance(task, ModelTask):
                ignored = task.keys_to_ignore if ignore_keys is None else ignore_keys
                output = task.predict_batch(
                    lambda batch: self._slot_compute_loss(model, batch, return_outputs=True, num_items_in_batch=count),
                    inputs,
                    loss_only=prediction_loss_only,
                    ignore=ignored,
                    note_outputs=self._note_memory if self.args.past_index >= 0 else None,
                )
            elif self._stage == "predict":
                output = StepOutput(outputs=task.prediction_step(inputs))
            else:
                output = as_step_output(task.evaluation_step(inputs), step=f"{type(task).__name__}.evaluation_step")
                self._items_check.see(output, inputs)
        if mean is not None:
            output.loss = mean.see(output.loss, count)
        self._eval_logs = output.logs
        if prediction_loss_only:
            return output.loss, None, None
        is_cast = isinstance(task, ModelTask) and self.precision.policy.autocast and self._computing.input_dtype is None
        return output.loss, to_float32(output.outputs) if is_cast else output.outputs, output.labels

    def _note_memory(self, outputs: Any) -> None:
        """Store the memory that a model called without labels passes to the next step (`past_index`)."""
        self._computing.past = read_memory(outputs, self.args.past_index, has_loss=False)

    def _read_metrics(self) -> dict[str, Any]:
        """Compute and reset the task's metrics; torchmetrics synchronises ranks."""
        stage, where = ("train", "training_step") if self._stage == "train" else ("eval", "evaluation_step")
        metrics = self.task.metrics(stage)
        if stage == "eval" and type(self.task).metrics is TaskModule.metrics:
            warn_of_unreported(self.task, metrics)
        elif stage == "train":
            warn_of_unread(TaskModule.metrics(self.task, "eval"), metrics)
        return read_metrics(metrics, stage=where, gather_object=self.strategy.gather_object)

    @contextmanager
    def _running(self, stage: str) -> Iterator[None]:
        """Launch the strategy, and open the precision while a documented method runs."""
        previous, self._stage = self._stage, stage
        self._depth += 1
        try:
            if self._depth == 1:
                self._resolve_hooks(vars(self))  # again, because scripts may assign hooks to the instance
                self._memory.start("test" if stage == "predict" else stage)
                self.strategy.launch()
                self.precision.open(self.strategy.device, self.strategy.scaler_factory)
                if isinstance(self.task, ModelTask):
                    self.task.label_names, self.task.can_return_loss = list(self.label_names), self.can_return_loss
                self.compiler.open()
                if self.strategy.watch is not None:
                    self.strategy.watch.where = self._whereabouts
            with sharing_verbosity(), refusing_broadcast():
                yield
        except Exception as error:
            report_worker(error)
            if isinstance(error, RuntimeError):
                report_late_ranks(self.strategy, error)
            maker = f"{type(self).__name__}.compute_loss" if self._is_overridden("compute_loss") else None
            maker = maker or (None if self.compute_loss_func is None else "compute_loss_func")
            names, sets = self.label_names, (self.train_dataset, self.eval_dataset)
            explain_mistake(error, self.task, self.model, label_names=names, loss_maker=maker, datasets=sets)
            raise
        finally:
            self._depth -= 1
            self._stage = previous
            if self._depth == 0:
                self._stop_observing()
                self.compiler.close()
                self.precision.close()
                self._memory.stop()

    def _stop_observing(self) -> None:
        """Give the model its own call back, without autocast and observers."""
        if self._shares.found.watch is not None:
            self._shares.found.watch.close()
        if self._cast is not None:
            self._cast.set(autocast=None)
        self._cast = self._eval_mean = None

    def _whereabouts(self) -> str:
        return whereabouts(
            is_idle=self._depth == 0,
            stage=self._stage,
            step=self.state.global_step,
            phase=None if self._run_parts is None else self._run_parts.phase.text,
        )

    @contextmanager
    def _evaluating(self, stage: str, *, casts: bool = True) -> Iterator[None]:
        """Evaluate the unwrapped model in evaluation mode; weights, modes and random numbers are restored."""
        with self._running(stage), preserved_rng(), evaluation_weights(self.optimizer):
            is_training = self._run_parts is not None
            if not is_training:
                self.model = self.task.model = self.precision.convert(self.model)
            with ready(
                self.task,
                self.model,
                strategy=self.strategy,
                computing=self._computing,
                dtype=full_eval_dtype(self.args) if casts and self._computing.input_dtype is None else None,
                keeps_cache=keeps_cache(self.args),
                place=None if is_training else self._place,
                wrap=lambda model: self._wrap_model(model, training=False),
            ):
                yield

    def _place(self) -> None:
        """Prepare the forward pass of a model that is not being trained."""
        place_task(self.task, self.strategy)
        self.compiler.compile(self.model)
        self._cast_model()

    def _report_memory(self, metrics: dict[str, Any]) -> None:
        """Add the memory report of the current method, unless another one called it."""
        if self._depth == 1:
            metrics.update(self._memory.stop())

    def _check_evaluating(self) -> None:
        """Raise if evaluations do not work with the settings; warn about metrics that are never computed."""
        args, task = self.args, self.task
        check_evaluating(args, strategy=self.strategy, task=task, spill_dir=self.spill_dir)
        if self._is_overridden("prediction_loop") and not args.use_legacy_prediction_loop:
            warn_once(f"{type(self).__name__}.prediction_loop is not called without use_legacy_prediction_loop=True.")
        if generates(args) and not self._is_overridden("prediction_step"):
            warn_once(f"predict_with_generate=True has no effect in {type(self).__name__}; use Seq2SeqTrainer.")
        own = next((entry.metrics for entry in self._eval_sets.values() if entry.metrics is not None), None)
        metrics = self.compute_metrics or own
        if args.prediction_loss_only and metrics is not None:
            warn_once("compute_metrics is never called with prediction_loss_only=True, which keeps no predictions.")
