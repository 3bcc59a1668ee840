"""One evaluation or prediction pass over a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn
from torch.utils.data import IterableDataset

from hftrain.adapter.configs import evaluate_config
from hftrain.callbacks.runner import CallbackHandler
from hftrain.core.types import EvalLoopOutput, Owns, StepOutput
from hftrain.data.dispatch import takes_turns
from hftrain.data.grouping import reading_order
from hftrain.data.sizes import expected_samples
from hftrain.evaluation.tracing import JitModel
from hftrain.loops.contract import Loop, check_features
from hftrain.loops.evaluate import EvaluateHooks, EvaluateLoop, EvaluateParts
from hftrain.loops.predict import PredictLoop
from hftrain.strategies.base import Strategy
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule


def run_evaluation(
    loader: Any,
    hooks: EvaluateHooks,
    *,
    args: Any,
    model: nn.Module,
    strategy: Strategy,
    events: CallbackHandler,
    loops: Mapping[str, Loop[Any]],
    loss_only: bool,
    spill_dir: Path | None,
    is_prediction: bool,
) -> EvalLoopOutput:
    """Run a prepared model over a loader. Collective.

    Args:
        model: The unwrapped model.
        loops: The Trainer's custom loops, by stage.
        loss_only: Keep no predictions.
        spill_dir: See `EvaluateConfig`.

    Returns:
        Predictions, labels and metrics; metric names have no prefix yet.
    """
    kind = PredictLoop if is_prediction else EvaluateLoop
    loop = cast(EvaluateLoop, loops.get(kind.stage) or kind())
    # A callback that writes the predictions may request that they are not returned.
    is_replaced = is_prediction and any(getattr(each, "replaces_predictions", False) for each in events.callbacks)
    config = evaluate_config(
        args,
        keeps_predictions=not loss_only,
        input_name=getattr(model, "main_input_name", "input_ids"),
        spill_dir=spill_dir,
        returns_predictions=not is_replaced,
    )
    used = used_in_evaluation(
        args,
        strategy,
        dataset=getattr(loader, "dataset", None),
        takes_turns=hooks.repeat_batch is not None,
        is_per_batch=config.computes_per_batch and hooks.compute_metrics is not None,
    )
    check_features(loop, used)
    loop.attach(EvaluateParts(config=config, hooks=hooks, group=strategy, events=events))
    try:
        return loop.run(
            loader,
            is_interleaved=takes_turns(loader),
            order=reading_order(loader),
            num_expected=expected_samples(loader),
        )
    finally:
        loop.detach()


class LossMean(Protocol):
    """Weighs the losses of an evaluation's batches, and tells at its end what they are means over."""

    kinds: tuple[str, ...]

    def weights(self, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return, for each of `kinds`, the weight of a batch's loss and its number of items."""

    def choose(self) -> str:
        """Return one of `kinds`, the same in every process; collective."""


def evaluation_hooks(
    task: TaskModule,
    strategy: Strategy,
    *,
    step: Callable[[nn.Module, Any], StepOutput],
    steps_talk: bool,
    mean: LossMean | None,
    read_metrics: Callable[[], Mapping[str, Any]],
    jit: JitModel | None,
    is_prediction: bool,
    **others: Callable[..., Any] | None,
) -> EvaluateHooks:
    """Build the loop's hooks from the Trainer's methods.

    Args:
        step: (model, batch) -> the result of the documented `prediction_step`, with the values that the task logs.
        steps_talk: See `may_talk`.
        mean: Weighs the losses of a plain model; None weighs by the task's items.
        others: Passed on to `EvaluateHooks`.
    """

    def evaluate_batch(batch: Any) -> StepOutput:
        if jit is not None:
            task.model = jit.for_batch(batch)
        return step(task.model, batch)

    return EvaluateHooks(
        evaluate_batch=evaluate_batch,
        count_items=task.count_items if mean is None else mean.weights,
        kinds=("",) if mean is None else mean.kinds,
        choose_kind=None if mean is None else mean.choose,
        needs_labels=not is_prediction,
        repeat_batch=(lambda batch: step(task.model, batch)) if steps_talk else None,
        finish=strategy.finish_forwards,
        read_metrics=None if is_prediction and mean is None else read_metrics,
        **others,
    )


def may_talk(
    strategy: Strategy,
    task: TaskModule,
    *,
    generates: bool,
    has_accelerator: bool,
    is_per_batch: bool,
    is_overridden: Callable[[str], bool],
) -> bool:
    """Return whether evaluation steps may communicate; every rank must then run the same number of steps."""
    if strategy.world_size == 1:
        return False
    # All ranks of a sharded model generate in lockstep (`synced_gpus`).
    if strategy.shards_model and generates:
        return True
    # With metrics per batch, hftrain's own step leaves communication to the metrics.
    is_own = is_per_batch and not any(map(is_overridden, ("prediction_step", "compute_loss")))
    return has_accelerator and isinstance(task, ModelTask) and not is_own


def used_in_evaluation(
    args: Any, strategy: Strategy, *, dataset: Any, takes_turns: bool, is_per_batch: bool
) -> dict[str, str]:
    """Return the optional loop features that an evaluation uses, each with the setting that requests it.

    Args:
        takes_turns: Whether steps may communicate with other processes.
        is_per_batch: Whether metrics are computed batch by batch.
    """
    asked = {
        "accelerator": (takes_turns, "trainer.accelerator, or a split model that generates,"),
        "batch_eval_metrics": (is_per_batch, f"batch_eval_metrics={args.batch_eval_metrics}"),
        "engines": (bool(strategy.owns & (Owns.BACKWARD | Owns.STEP)), f"strategy={strategy.name!r}"),
        "ranks": (strategy.world_size > 1, f"{strategy.world_size} processes"),
        "sharded_models": (strategy.shards_model, f"strategy={strategy.name!r}"),
        "streams": (isinstance(dataset, IterableDataset), "a stream"),
    }
    return {feature: text for feature, (is_used, text) in asked.items() if is_used}
