"""A Trainer's evaluations: which sets are due, the loop, one step, and what the losses are means over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from hftrain.core.errors import TaskError
from hftrain.core.extras import extra
from hftrain.core.log import get_logger, warn_once
from hftrain.core.metrics import numbers_of, speed_metrics, to_plain, with_prefix
from hftrain.core.notes import describe
from hftrain.core.preserve import temporarily
from hftrain.core.signatures import Hooks
from hftrain.core.types import EvalLoopOutput, StepOutput
from hftrain.data.datasets import EvalSet, expected_samples, has_length, is_due, split_eval_sets
from hftrain.data.loaders import first_batches
from hftrain.data.samplers import reading_order
from hftrain.data.sharding import takes_turns
from hftrain.evaluation.preparation import generates
from hftrain.loops.evaluate import EvaluateConfig, EvaluateHooks, EvaluateLoop, EvaluateParts, PredictLoop
from hftrain.rules.evaluation import check_cadences, check_evaluation
from hftrain.run.parts import TrainerHooks
from hftrain.task.items import OWN_ITEMS
from hftrain.task.metric_state import candidate_metrics, read_metrics, reset, warn_of_unread
from hftrain.task.model_call import to_float32
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, as_step_output, check_defined
from hftrain.trainer.activity import Activity
from hftrain.trainer.data import TrainerData
from hftrain.trainer.evaluation_mean import EvaluationMean

logger = get_logger(__name__)


class Evaluation:
    """Evaluate and predict for a Trainer.

    Attributes:
        mean: Weighs the losses of a plain model; set during an evaluation.
    """

    def __init__(
        self, trainer: TrainerHooks, hooks: Hooks, activity: Activity, data: TrainerData, sets: dict[str, EvalSet]
    ) -> None:
        self._trainer, self._hooks, self._activity, self._data, self.sets = trainer, hooks, activity, data, sets
        self._steps, self._computing = activity.steps, activity.steps.computing
        self.mean: EvaluationMean | None = None
        # Values that the task has logged in the last step.
        self._logs: Mapping[str, Any] = {}

    def check(self) -> None:
        """Raise if evaluations do not work with the settings; warn about metrics that are never computed."""
        trainer, args, owner = self._trainer, self._trainer.args, type(self._trainer).__name__
        check_evaluation(args, strategy=trainer.strategy, task=trainer.task)
        if generates(args) and not self._hooks.is_overridden("prediction_step"):
            warn_once(f"predict_with_generate=True has no effect in {owner}; use Seq2SeqTrainer.")
        set_metrics = next((entry.metrics for entry in self.sets.values() if entry.metrics is not None), None)
        if args.prediction_loss_only and (trainer.compute_metrics or set_metrics) is not None:
            warn_once("compute_metrics is never called with prediction_loss_only=True, which keeps no predictions.")

    # -- sets ------------------------------------------------------------------------------------------------------

    def over_sets(
        self, datasets: Mapping[str, Any], ignore_keys: list[str] | None, prefix: str, *, is_own: bool
    ) -> dict[str, float]:
        """Evaluate on each set that is due; return all their metrics."""
        datasets_by_name, entries = split_eval_sets(datasets)
        sets, metrics = self.sets if is_own else entries, dict[str, float]()
        for name in filter(lambda name: self._is_due(sets.get(name)), datasets_by_name):
            # Passed by name, so that an override of `get_eval_dataloader` sees the name.
            name_or_dataset = name if is_own else datasets_by_name[name]
            with self.with_set_metrics(sets.get(name)):
                metrics.update(self._trainer.evaluate(name_or_dataset, ignore_keys, f"{prefix}_{name}"))
        return metrics

    def _is_due(self, entry: EvalSet | None) -> bool:
        """Return whether an evaluation set is part of the current evaluation."""
        trainer = self._trainer
        is_asked_for = self._activity.run_parts is None or bool(trainer.fast_dev_run)
        return is_asked_for or is_due(entry, trainer.state, by_epoch=trainer.args.eval_strategy == "epoch")

    @property
    def has_all_sets(self) -> bool:
        """Whether the current evaluation is over all sets."""
        return all(map(self._is_due, self.sets.values()))

    def with_set_metrics(self, entry: EvalSet | None) -> AbstractContextManager[None]:
        """Replace `compute_metrics` by an evaluation set's own metrics temporarily."""
        metrics = None if entry is None else entry.metrics
        return nullcontext() if metrics is None else temporarily(self._trainer, compute_metrics=metrics)

    def check_cadences(self) -> None:
        """Raise if a set is never evaluated; the length of the run is known."""
        check_cadences(self._trainer.args, self.sets, eval_steps=self._trainer.state.eval_steps)

    def try_out(self) -> None:
        """Evaluate the first batches of every set for its errors alone: nothing is logged, no callback called."""
        trainer, handler, eval_dataset = self._trainer, self._trainer.callback_handler, self._trainer.eval_dataset
        callbacks, loader = list(handler.callbacks), handler.eval_dataloader
        handler.callbacks.clear()
        handler.refresh()
        try:
            for name in eval_dataset if isinstance(eval_dataset, Mapping) else [None]:
                with self.with_set_metrics(self.sets.get(name or "")), self._activity.evaluating("eval"):
                    self.run_and_time(
                        first_batches(self._data.eval_share(name), trainer.limits.sanity_eval_batches),
                        description="Sanity evaluation",
                        prediction_loss_only=True if trainer.compute_metrics is None else None,
                        ignore_keys=None,
                        metric_key_prefix="eval" if name is None else f"eval_{name}",
                    )
        finally:
            handler.callbacks[:] = callbacks
            handler.refresh(eval_dataloader=loader)

    # -- one evaluation ---------------------------------------------------------------------------------------------

    def run_and_time(
        self, loader: Any, *, metric_key_prefix: str, **options: Any
    ) -> tuple[EvalLoopOutput, dict[str, Any]]:
        """Call the documented loop on this rank's share of a loader; return its output, and its metrics with speed."""
        trainer, args = self._trainer, self._trainer.args
        start_s = time.perf_counter()
        output = trainer.evaluation_loop(loader, metric_key_prefix=metric_key_prefix, **options)
        # An override in the older style returns a PredictionOutput, which has no sample count.
        num_samples, num_steps = getattr(output, "num_samples", None), None
        if num_samples is not None:
            num_steps = math.ceil(num_samples / (args.eval_batch_size * trainer.strategy.data.world_size))
        # Tracing happens once and must not count towards the speed.
        start_s += output.metrics.get(f"{metric_key_prefix}_jit_compilation_time", 0.0)
        rates = speed_metrics(metric_key_prefix, start_s, num_samples=num_samples, num_steps=num_steps)
        return output, {**output.metrics, **rates}

    def warn_of_nothing(self, output: EvalLoopOutput) -> None:
        """Warn of an evaluation that reports nothing."""
        if not output.metrics:
            warn_once(
                f"The evaluation of {type(self._trainer.model).__name__} has no loss and no metric. Give the samples "
                "labels (label_names), return a loss, or compute metrics; for predictions alone, call predict()."
            )

    def main_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return metrics with the numbers of rank 0, which decide on every rank when to stop and what is best.

        An override of `evaluate` or random numbers may have made them differ. Collective.
        """
        mapping: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}  # an override may return anything
        numbers = numbers_of(mapping)
        main_numbers = self._trainer.strategy.broadcast_object(numbers)
        if not main_numbers:
            return metrics
        # As text, because NaN is not equal to itself; a value that is the same keeps its type.
        changes = {name: value for name, value in main_numbers.items() if repr(value) != repr(numbers.get(name))}
        return {**mapping, **changes}

    def loop(
        self,
        loader: Any,
        *,
        description: str,
        loss_only: bool,
        ignore_keys: list[str] | None,
        metric_key_prefix: str,
        finish_outputs: Callable[[Any], Any] | None,
    ) -> EvalLoopOutput:
        """Run the prepared model over a loader; collective."""
        trainer, args, events = self._trainer, self._trainer.args, self._trainer.callback_handler
        is_prediction = self._activity.name == "predict"
        is_plain = isinstance(trainer.task, ModelTask)
        if not (is_plain or trainer.loops or self._hooks.is_overridden("prediction_step", "compute_loss")):
            check_defined(trainer.task, "training_step", "evaluation_step", *["prediction_step"] * is_prediction)
        self._announce(loader, description)
        events.refresh(eval_dataloader=loader)
        trace = trainer.torch_jit_model_eval
        jit = extra("jit_mode_eval").JitModel(trace, trainer.task.model) if args.jit_mode_eval else None
        # A callback that writes the predictions may request that they are not returned.
        is_replaced = is_prediction and any(getattr(each, "replaces_predictions", False) for each in events.callbacks)
        config = EvaluateConfig.of(
            args,
            keeps_predictions=not loss_only,
            input_name=getattr(trainer.model, "main_input_name", "input_ids"),
            returns_predictions=not is_replaced,
        )
        hooks = self._make_evaluate_hooks(
            jit, loss_only=loss_only, ignore_keys=ignore_keys, finish_outputs=finish_outputs
        )
        loop_class = PredictLoop if is_prediction else EvaluateLoop
        loop = cast(EvaluateLoop, trainer.loops.get(loop_class.stage) or loop_class())
        if loop_class.stage in trainer.loops:
            extra("own_loops").check_features(loop, self._used_features(loader, hooks, config))
        loop.attach(EvaluateParts(config=config, hooks=hooks, group=trainer.strategy.data, events=events))
        try:
            output = loop.run(
                loader,
                is_interleaved=takes_turns(loader),
                order=reading_order(loader),
                num_expected=expected_samples(loader),
            )
        finally:
            loop.detach()
            self.mean = None
        metrics = to_plain(with_prefix(output.metrics, metric_key_prefix))
        if jit is not None and jit.compilation_s is not None:
            metrics[f"{metric_key_prefix}_jit_compilation_time"] = jit.compilation_s
        return EvalLoopOutput(output.predictions, output.label_ids, metrics, output.num_samples)

    def _announce(self, loader: Any, description: str) -> None:
        logger.info("***** Running %s *****", description)
        dataset = getattr(loader, "dataset", None)
        is_known = has_length(dataset) or (dataset is None and has_length(loader))
        logger.info("  Num examples = %s", self._trainer.num_examples(loader) if is_known else "unknown")
        if num_first := getattr(loader, "num_first", 0):
            logger.info("  Batches read by each process = at most %d", num_first)
        logger.info("  Batch size = %d", self._trainer.args.eval_batch_size)

    def _used_features(self, loader: Any, hooks: EvaluateHooks, config: EvaluateConfig) -> dict[str, str]:
        return extra("own_loops").used_in_evaluation(  # type: ignore[no-any-return]
            self._trainer.args,
            self._trainer.strategy,
            dataset=getattr(loader, "dataset", None),
            takes_turns=hooks.repeat_batch is not None,
            is_per_batch=config.computes_per_batch and hooks.compute_metrics is not None,
        )

    def _make_evaluate_hooks(
        self,
        jit: Any,
        *,
        loss_only: bool,
        ignore_keys: list[str] | None,
        finish_outputs: Callable[[Any], Any] | None,
    ) -> EvaluateHooks:
        trainer, task, strategy = self._trainer, self._trainer.task, self._trainer.strategy
        mean = self.mean = EvaluationMean(task, self._steps.shares) if isinstance(task, ModelTask) else None
        is_prediction = self._activity.name == "predict"
        compute_metrics = None if loss_only else trainer.compute_metrics
        may_communicate = self._steps_may_communicate(has_metrics=compute_metrics is not None)

        def step(batch: Any) -> StepOutput:
            result = trainer.prediction_step(task.model, batch, loss_only, ignore_keys)
            loss, outputs, labels = _check_parts(result, "prediction_step", "loss", "logits", "labels")
            return StepOutput(loss=loss, outputs=outputs, labels=labels, logs=self._logs)

        def evaluate_batch(batch: Any) -> StepOutput:
            if jit is not None:
                task.model = jit.for_batch(batch)
            return step(batch)

        return EvaluateHooks(
            evaluate_batch=evaluate_batch,
            count_items=task.count_items if mean is None else mean.weights,
            kinds=(OWN_ITEMS,) if mean is None else mean.kinds,
            choose_mean=None if mean is None else mean.choose,
            compute_metrics=compute_metrics,
            preprocess_logits=trainer.preprocess_logits_for_metrics,
            needs_labels=not is_prediction,
            repeat_batch=step if may_communicate else None,
            finish=strategy.finish_forwards,
            read_metrics=None if is_prediction and mean is None else self.read_metrics,
            finish_outputs=finish_outputs,
        )

    def _steps_may_communicate(self, *, has_metrics: bool) -> bool:
        """Return whether evaluation steps may communicate; every rank must then run the same number of steps."""
        trainer, strategy = self._trainer, self._trainer.strategy
        if strategy.world_size == 1:
            return False
        # All ranks of a sharded model generate in lockstep (`synced_gpus`).
        if strategy.shards_model and generates(trainer.args):
            return True
        # With metrics per batch, hftrain's own step leaves communication to the metrics.
        is_per_batch = trainer.args.batch_eval_metrics and has_metrics
        is_own = is_per_batch and not self._hooks.is_overridden("prediction_step", "compute_loss")
        return self._computing.accelerator is not None and isinstance(trainer.task, ModelTask) and not is_own

    def step(
        self, model: nn.Module, inputs: Any, *, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, outputs and labels of one batch (each may be None), without gradients."""
        trainer, task, mean, computing = self._trainer, self._trainer.task, self.mean, self._computing
        inputs = self._hooks.prepare_inputs(inputs)
        count = self._steps.shares.count_to_tell([inputs])
        if mean is not None:
            mean.open(inputs)

        def compute(batch: Any) -> Any:
            result = self._hooks.compute_loss(model, batch, return_outputs=True, num_items_in_batch=count)
            return _check_parts(result, "compute_loss(return_outputs=True)", "loss", "outputs")

        def note_memory(outputs: Any) -> None:
            computing.past = extra("past_index").read_memory(outputs, trainer.args.past_index, has_loss=False)

        with torch.no_grad(), trainer.compute_loss_context_manager():
            if isinstance(task, ModelTask):
                output = task.predict_batch(
                    compute,
                    inputs,
                    loss_only=loss_only,
                    ignore=task.keys_to_ignore if ignore_keys is None else ignore_keys,
                    is_overridden=self._hooks.is_overridden("compute_loss"),
                    note_outputs=note_memory if trainer.args.past_index >= 0 else None,
                )
            elif self._activity.name == "predict":
                output = StepOutput(outputs=task.prediction_step(inputs))
            else:
                output = as_step_output(task.evaluation_step(inputs), step=f"{type(task).__name__}.evaluation_step")
                self._steps.items_check.see(output, inputs)
        if mean is not None:
            mean.see(output.loss, count)
        self._logs = output.logs
        if loss_only:
            return output.loss, None, None
        is_cast = isinstance(task, ModelTask) and trainer.precision.policy.autocast and computing.input_dtype is None
        return output.loss, to_float32(output.outputs) if is_cast else output.outputs, output.labels

    def read_metrics(self) -> dict[str, Any]:
        """Compute the task's metrics, and reset those of training; torchmetrics synchronises ranks."""
        task = self._trainer.task
        stage, where = ("train", "training_step") if self._activity.name == "train" else ("eval", "evaluation_step")
        metrics = task.metrics(stage)
        if stage == "eval" and type(task).metrics is TaskModule.metrics:
            message = "are updated but not reported: only the task's own children are. Make each an attribute of the "
            warn_of_unread(candidate_metrics(task), metrics, f"{message}task, or return them from its metrics(stage).")
        elif stage == "train":
            message = 'are updated in training but not reported there. Return them from the task\'s metrics("train"), '
            children = TaskModule.metrics(task, "eval")
            warn_of_unread(children, metrics, f"{message}or update them in evaluation_step alone.")
        values = read_metrics(metrics, stage=where, ranks=self._trainer.strategy.data)
        if stage == "train":
            reset(metrics)
        return values


def _check_parts(result: Any, maker: str, *names: str) -> Any:
    """Return what an override returned; raise unless it is a tuple or a list of the named parts."""
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        return result
    raise TaskError(
        f"Cannot use what {maker} returned:",
        f"it is {describe(result)}, and not {len(names)} parts.",
        f"Return ({', '.join(names)}).",
    )
