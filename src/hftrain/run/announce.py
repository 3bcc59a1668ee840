"""Log messages about a run when it starts, at level INFO."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from hftrain.core.log import get_logger
from hftrain.data.sizes import has_length
from hftrain.run.parts import RunParts
from hftrain.run.plan import RunPlan

logger = get_logger(__name__)


def announce_training(parts: RunParts, plan: RunPlan) -> None:
    """Log the length and batch sizes of a run; parameters are counted only if the message is shown."""
    if not logger.isEnabledFor(logging.INFO):
        # Counting parameters is not free.
        return
    args, progress, num_epochs = parts.args, parts.progress, plan.length.num_epochs
    logger.info("***** Running training *****")
    logger.info("  Num examples = %s", f"{plan.length.num_examples:,}")
    logger.info("  Num Epochs = %s", "as many as the steps need" if num_epochs == sys.maxsize else f"{num_epochs:,}")
    if plan.length.num_batches is not None:
        logger.info("  Num update steps per epoch = %s", f"{plan.length.steps_per_epoch:,}")
    logger.info("  Instantaneous batch size per device = %s", f"{args.per_device_train_batch_size:,}")
    logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %s", f"{plan.total_batch_size:,}")
    logger.info("  Gradient Accumulation steps = %d", args.gradient_accumulation_steps)
    logger.info("  Total optimization steps = %s", f"{plan.max_steps:,}")
    logger.info("  Number of trainable parameters = %s", f"{parts.trainer.get_num_trainable_parameters():,}")
    if progress.step:
        logger.info("  Continuing from the checkpoint: from epoch %d, global step %d", progress.epoch, progress.step)
        if not args.ignore_data_skip:
            logger.info("  Passing over the first %d batches of that epoch", progress.micro_steps_in_epoch)


def announce_evaluation(loader: Any, *, description: str, batch_size: int, count_samples: Callable[[Any], int]) -> None:
    """Log the size of an evaluation."""
    logger.info("***** Running %s *****", description)
    dataset = getattr(loader, "dataset", None)
    is_known = has_length(dataset) or (dataset is None and has_length(loader))
    logger.info("  Num examples = %s", count_samples(loader) if is_known else "unknown")
    logger.info("  Batch size = %d", batch_size)
