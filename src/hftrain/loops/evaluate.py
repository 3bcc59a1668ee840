"""Evaluation and prediction: one pass without gradients; metrics are streamed, and predictions kept only if needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.core.metrics import merge_reports
from hftrain.core.notes import keep_facts
from hftrain.core.tree import batch_size_of
from hftrain.core.types import EvalLoopOutput, EvalPrediction, StepOutput
from hftrain.data.datasets import has_length
from hftrain.loops.contract import Loop, Stage
from hftrain.loops.fit import Events
from hftrain.loops.window import LogWindow
from hftrain.strategies.base import Ranks
from hftrain.task.items import OWN_ITEMS, known_count
from hftrain.task.module import checked_count

_END = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What an evaluation keeps and returns.

    Args:
        keeps_predictions: Keep outputs and labels of the whole set.
        moves_every: Batches kept on the device before they move to the host; None moves them at the end.
        joins_batches: Concatenate over batches; otherwise return one entry per batch.
        computes_per_batch: Call `compute_metrics` with each batch and keep nothing.
        includes: Further inputs of `compute_metrics`: ``"inputs"``, ``"loss"``.
        input_name: The key of the batch's main input.
        takes_objects: Also keep values that are not tensors.
        returns_predictions: Return predictions even if `compute_metrics` does not need them.
    """

    keeps_predictions: bool = False
    moves_every: int | None = None
    joins_batches: bool = True
    computes_per_batch: bool = False
    includes: tuple[str, ...] = ()
    input_name: str = "input_ids"
    takes_objects: bool = False
    returns_predictions: bool = True

    @classmethod
    def of(cls, args: Any, *, keeps_predictions: bool, **settings: Any) -> EvaluateConfig:
        """Return the config that the training arguments choose, with what the Trainer knows besides."""
        return cls(
            keeps_predictions=keeps_predictions and not args.batch_eval_metrics,
            moves_every=args.eval_accumulation_steps,
            joins_batches=args.eval_do_concat_batches,
            computes_per_batch=args.batch_eval_metrics,
            includes=tuple(args.include_for_metrics),
            takes_objects=args.eval_use_gather_object,
            **settings,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateHooks:
    """The functions that the loop calls.

    Args:
        evaluate_batch: batch -> loss, outputs, labels, logs.
        count_items: batch -> the number of items its mean loss averages over; or, for each of `kinds`, the weight of
            its loss and its number of items.
        kinds: The kinds of item that the loss may average over, the same in every process.
        choose_mean: Given the mean loss by kind after the last batch, returns which it is; collective.
        compute_metrics: The user's function on predictions and labels, or None.
        preprocess_logits: Applied to (logits, labels) before they are kept, or None.
        needs_labels: Whether `compute_metrics` must run: a batch without labels or predictions is then an error.
        repeat_batch: Runs a step on a batch again and drops the result; set if steps may communicate, so that each
            rank runs as many steps as the one with the most batches.
        finish: Runs the forward passes that other ranks still need of this one; called after the last batch, and
            after each turn if ranks take turns. Collective.
        read_metrics: Computes the task's own metrics; collective.
        finish_outputs: Applied to the collected, joined outputs.
    """

    evaluate_batch: Callable[[Any], StepOutput]
    count_items: Callable[[Any], int | torch.Tensor | Mapping[str, tuple[Any, Any]]]
    kinds: tuple[str, ...] = (OWN_ITEMS,)
    choose_mean: Callable[[Mapping[str, float]], float | None] | None = None
    compute_metrics: Callable[..., Mapping[str, Any]] | None = None
    preprocess_logits: Callable[[Any, Any], Any] | None = None
    needs_labels: bool = False
    repeat_batch: Callable[[Any], Any] | None = None
    finish: Callable[[], None] | None = None
    read_metrics: Callable[[], Mapping[str, Any]] | None = None
    finish_outputs: Callable[[Any], Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateParts:
    """Parts of an evaluation, created by the Trainer for each evaluation.

    Args:
        events: Sends `on_prediction_step` to callbacks.
    """

    config: EvaluateConfig
    hooks: EvaluateHooks
    group: Ranks
    events: Events


@dataclass(slots=True)
class LossSum:
    """The weighted losses of all batches, and the items that they are the mean over."""

    total: Any = 0.0
    num_items: Any = 0.0


class EvaluateLoop(Loop[EvaluateParts]):
    """Run every batch of a loader once and reduce the results of the steps.

    The loss is the mean over items, not batches, so it is independent of the batch size and the number of ranks.
    Subclasses may override the methods without an underscore.
    """

    stage: ClassVar[Stage] = "evaluate"

    def attach(self, parts: EvaluateParts) -> None:
        super().attach(parts)
        config, hooks, group = parts.config, parts.hooks, parts.group
        self._buffers: dict[str, Any] = {}
        self._batch_metrics: Any = None
        if config.computes_per_batch and hooks.compute_metrics is not None:
            self._batch_metrics = extra("prediction_metrics").BatchMetrics(
                hooks.compute_metrics,
                group=group,
                takes_objects=config.takes_objects,
                finish_outputs=hooks.finish_outputs,
            )
        self._logs = LogWindow(gather_object=group.gather_object)
        # In double precision if the device has it, because the sum must not depend on the batch size.
        self._sum_dtype = torch.float32 if group.device.type == "mps" else torch.float64
        self._loss_sums = {kind: LossSum() for kind in hooks.kinds}
        self._num_samples = 0
        self._order: Any = None

    @property
    def stops_early(self) -> bool:
        """Whether a subclass overrides `should_stop`."""
        return type(self).should_stop is not EvaluateLoop.should_stop

    def run(
        self, loader: Any, *, is_interleaved: bool = False, order: Any = None, num_expected: int | None = None
    ) -> EvalLoopOutput:
        """Evaluate the batches; collective at the end only, unless ranks take batches in turn.

        Args:
            loader: This rank's batches.
            is_interleaved: Ranks take batches in turn (streams); else each holds a contiguous run.
            order: Dataset indices of the samples in reading order, if that differs from the dataset's order.
            num_expected: The number of samples of this rank, if known.

        Returns:
            Predictions and labels in the data's order (None if not kept), metrics without prefix, sample count.
        """
        config, hooks = self.parts.config, self.parts.hooks
        self._order = order
        self._open(num_expected)
        num_read = self._run_batches(iter(loader))
        if num_read is not None and has_length(loader) and num_read != len(loader):
            # Raises if batches are missing, which the dataset, its collator or its sampler has lost.
            extra("shares").check_pass(loader, num_read, len(loader), is_training=False)
        if hooks.finish is not None:
            hooks.finish()
        per_batch = {} if self._batch_metrics is None else self._batch_metrics.metrics
        reports: list[Mapping[str, Any]] = [self._mean_loss(), self._logs.read(), per_batch]
        if hooks.read_metrics is not None:
            reports.append(hooks.read_metrics())
        arrays = {name: self._collect(name, is_interleaved) for name in tuple(self._buffers)}
        predictions, labels = arrays.pop("outputs", None), arrays.pop("labels", None)
        num_samples = int(self.parts.group.reduce(torch.tensor(self._num_samples, device=self.parts.group.device)))
        if predictions is not None and config.joins_batches and num_samples:
            extra("predictions").check_rows(predictions, labels, num_samples)
        is_complete = predictions is not None and labels is not None
        if hooks.compute_metrics is not None and not config.computes_per_batch and is_complete:
            prediction = EvalPrediction(predictions, labels, **arrays)
            reports.append(extra("prediction_metrics").call_metrics(hooks.compute_metrics, prediction))
        if not config.returns_predictions:
            predictions = labels = None
        metrics = merge_reports(*reports)
        if not num_samples and not num_read and not metrics:
            warn_once(
                "An evaluation read no sample, so it reports no metric. A stream that can be read only once was used "
                "up by the evaluation before: let its __iter__ start again."
            )
        return EvalLoopOutput(predictions, labels, metrics, num_samples)

    def _run_batches(self, batches: Iterator[Any]) -> int | None:
        """Run this rank's batches, and take part in the turns of ranks that have more if these need it.

        Returns the number of batches; None if it stopped before the last one.

        In a turn without a batch, a rank repeats its last one if steps may communicate (and drops the result), runs
        the forward passes that a split model needs of it, and adds nothing to metrics computed per turn.
        """
        hooks, metrics = self.parts.hooks, self._batch_metrics
        is_watched = self.stops_early or metrics is not None or hooks.repeat_batch is not None
        takes_turns = self.parts.group.world_size > 1 and is_watched
        agree: Callable[[bool], bool] = self.parts.group.all_true if takes_turns else bool
        upcoming, last_batch = next(batches, _END), None
        if takes_turns and hooks.repeat_batch is not None and not agree(upcoming is not _END):
            raise ConfigError(
                "Cannot evaluate with an accelerator in use, or a split model that generates.",
                "Its steps may talk to other processes, and one of them has no batch to take part with.",
                "Evaluate on at least one sample per process.",
            )
        is_over, num_read = agree(upcoming is _END), 0
        while not is_over:
            output = None
            parts: Mapping[str, Any] = {}
            if upcoming is not _END:
                num_read += 1
                batch, upcoming = upcoming, next(batches, _END)
                last_batch = _copied(batch) if upcoming is _END else None  # a step may pop from what it is given
                output = self.run_batch(batch)
                if metrics is not None:
                    parts = self._batch_parts(batch, output)
                self._fire_prediction_step(output)
            elif hooks.repeat_batch is not None:
                hooks.repeat_batch(_copied(last_batch))
            if takes_turns and hooks.finish is not None:
                hooks.finish()
            is_enough = self.stops_early and self.should_stop(output)
            is_over = agree(is_enough or upcoming is _END)
            if metrics is not None:
                metrics.add(parts, is_last=is_over)
        if self.stops_early and self._order is not None and not agree(upcoming is _END):
            # If not all samples were read, only the reading order is left.
            self._order = None
        return num_read if upcoming is _END else None

    def should_stop(self, output: StepOutput | None) -> bool:
        """Return after each batch whether to stop; the evaluation stops once every process returns True.

        It is also called on processes that have no batches left, so an override may communicate.

        Args:
            output: The result of `run_batch`; None if this process had no batch left.
        """
        return False

    def _open(self, num_expected: int | None) -> None:
        config = self.parts.config
        is_needed = self.parts.hooks.compute_metrics is not None and not config.computes_per_batch
        if not config.keeps_predictions or not (config.returns_predictions or is_needed):
            return
        gather = extra("predictions")
        kind = partial(gather.RowCollector, num_samples=num_expected) if config.joins_batches else gather.BatchCollector
        for name in ("outputs", "labels", "inputs", "losses") if is_needed else ("outputs", "labels"):
            self._buffers[name] = kind(moves_every=config.moves_every, takes_objects=config.takes_objects)

    def _fire_prediction_step(self, output: StepOutput) -> None:
        self.parts.events.fire("on_prediction_step")

    def run_batch(self, batch: Any) -> StepOutput:
        """Evaluate one batch: accumulate its loss and store its predictions if needed."""
        try:
            output = self.parts.hooks.evaluate_batch(batch)
        except Exception as error:
            keep_facts(error, batch=batch)
            raise
        size = batch_size_of(batch) or 0
        self._num_samples += size
        if output.loss is not None:
            if output.loss.numel() != 1:
                raise TaskError(
                    "Cannot use the loss of an evaluation batch:",
                    f"it has the shape {tuple(output.loss.shape)}, but a loss must be one number.",
                    "Return its mean; outputs belong in StepOutput(loss=..., outputs=...).",
                )
            count = self.parts.hooks.count_items(batch)
            if not isinstance(count, Mapping):
                checked_count(count, self.parts.hooks.count_items)
            self._add_loss(output.loss.detach(), count)
        if self.parts.hooks.compute_metrics is not None and self.parts.hooks.needs_labels:
            _check_complete(output, batch)
        self._logs.add(output.logs, weight=size or 1)
        if self.parts.hooks.preprocess_logits is not None and output.outputs is not None:
            output.outputs = self.parts.hooks.preprocess_logits(output.outputs, output.labels)
            if self.parts.hooks.compute_metrics is not None and output.outputs is None:
                raise TaskError(
                    "Cannot use what preprocess_logits_for_metrics returned:",
                    "it is None, so there is nothing to call compute_metrics with.",
                    "Return what compute_metrics is to get as predictions.",
                )
        if self._buffers:
            for name, part in self._batch_parts(batch, output).items():
                if name in self._buffers:
                    self._buffers[name].add(part)
        return output

    def _batch_parts(self, batch: Any, output: StepOutput) -> dict[str, Any]:
        """Return the parts of a batch that `compute_metrics` receives; the loss is repeated per sample."""
        parts = {"outputs": output.outputs, "labels": output.labels}
        if "inputs" in self.parts.config.includes and self.parts.hooks.compute_metrics is not None:
            parts["inputs"] = _main_input(batch, self.parts.config.input_name)
        if "loss" in self.parts.config.includes and output.loss is not None:
            parts["losses"] = output.loss.detach().repeat(batch_size_of(batch) or 0)
        return parts

    def _collect(self, name: str, is_interleaved: bool) -> Any:
        joined = self._buffers.pop(name).joined(self.parts.group, is_interleaved=is_interleaved, order=self._order)
        finish = self.parts.hooks.finish_outputs
        return joined if finish is None or name != "outputs" else finish(joined)

    def _add_loss(self, loss: torch.Tensor, counts: Any) -> None:
        loss = loss.reshape(()).to(self._sum_dtype)
        for kind, loss_sum in self._loss_sums.items():
            # Those that are on the host would have to be copied to the device.
            factor, count = map(known_count, counts[kind] if isinstance(counts, Mapping) else (counts, counts))
            if isinstance(count, torch.Tensor):
                count = count.reshape(()).to(loss, non_blocking=True)
                factor = factor.reshape(()).to(loss, non_blocking=True) if isinstance(factor, torch.Tensor) else factor
                # The mean loss of a batch without items is NaN, which must not reach the sum.
                loss_sum.total += torch.where(count > 0, loss * factor, 0.0)
            elif count:
                loss_sum.total += loss * factor
            loss_sum.num_items += count

    def _mean_loss(self) -> dict[str, float]:
        hooks, device = self.parts.hooks, self.parts.group.device
        pairs = [number for each in self._loss_sums.values() for number in (each.total, each.num_items)]
        sums = torch.stack([torch.as_tensor(number, dtype=self._sum_dtype, device=device) for number in pairs])
        totals = zip(hooks.kinds, self.parts.group.reduce(sums).reshape(-1, 2).tolist(), strict=True)
        means = {kind: total / num_items for kind, (total, num_items) in totals if num_items}
        loss = means.get(hooks.kinds[0]) if hooks.choose_mean is None else hooks.choose_mean(means)
        return {} if loss is None else {"loss": loss}


class PredictLoop(EvaluateLoop):
    """Run every batch once and return the predictions in dataset order; loss and metrics require labels."""

    stage = "predict"

    def attach(self, parts: EvaluateParts) -> None:
        config = replace(parts.config, keeps_predictions=True)
        super().attach(replace(parts, config=config))

    def _fire_prediction_step(self, output: StepOutput) -> None:
        self.parts.events.fire("on_prediction_step", outputs=output.outputs, labels=output.labels)


def _copied(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _columns(batch: Any) -> str:
    return f"the columns {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "no named columns"


def _main_input(batch: Any, name: str) -> Any:
    """Return a batch's main input; raise if `compute_metrics` would get none."""
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    raise TaskError(
        "Cannot use include_for_metrics=['inputs'].",
        f"An evaluation batch has no main input {name!r} (it has {_columns(batch)}).",
        "Set main_input_name on the model to the column that compute_metrics is to get.",
    )


def _check_complete(output: StepOutput, batch: Any) -> None:
    for name, value in (("predictions", output.outputs), ("labels", output.labels)):
        if value is None:
            raise TaskError(
                "Cannot use compute_metrics.",
                f"An evaluation batch gave no {name} to call it with (the batch has {_columns(batch)}).",
                "Name the label columns in label_names, return StepOutput(outputs=..., labels=...) from a task's "
                "evaluation_step, or leave compute_metrics out.",
            )
