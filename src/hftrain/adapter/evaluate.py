"""What an evaluation keeps."""

from __future__ import annotations

from typing import Any

from hftrain.loops.evaluate import EvaluateConfig


def evaluate_config(args: Any, *, keeps_predictions: bool, input_name: str) -> EvaluateConfig:
    """Return what an evaluation keeps and hands to `compute_metrics`."""
    return EvaluateConfig(
        keeps_predictions=keeps_predictions and not args.batch_eval_metrics,
        moves_every=args.eval_accumulation_steps,
        joins_batches=args.eval_do_concat_batches,
        computes_per_batch=args.batch_eval_metrics,
        includes=tuple(args.include_for_metrics),
        input_name=input_name,
    )
