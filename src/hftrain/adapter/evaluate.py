"""What an evaluation keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hftrain.loops.evaluate import EvaluateConfig


def evaluate_config(
    args: Any,
    *,
    keeps_predictions: bool,
    input_name: str,
    spill_dir: Path | None = None,
    returns_predictions: bool = True,
) -> EvaluateConfig:
    """Return what an evaluation keeps and hands to `compute_metrics`."""
    return EvaluateConfig(
        keeps_predictions=keeps_predictions and not args.batch_eval_metrics,
        moves_every=args.eval_accumulation_steps,
        joins_batches=args.eval_do_concat_batches,
        computes_per_batch=args.batch_eval_metrics,
        includes=tuple(args.include_for_metrics),
        input_name=input_name,
        takes_objects=args.eval_use_gather_object,
        spill_dir=spill_dir,
        returns_predictions=returns_predictions,
    )


def full_eval_dtype(args: Any) -> torch.dtype | None:
    """Return the dtype to evaluate entirely in, None for the model's own."""
    if args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if args.fp16_full_eval else None
