"""What a run says about itself in the log, at level INFO, when it begins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from hftrain.arguments.training import TrainingArguments
from hftrain.core.log import get_logger
from hftrain.core.progress import Progress
from hftrain.data.sizes import has_length

logger = get_logger(__name__)


def announce_training(
    args: TrainingArguments,
    plan: tuple[Any, ...],
    *,
    batch_size: int,
    progress: Progress,
    count_parameters: Callable[[], int],
) -> None:
    """Log how long a run is and how its batches come about.

    Args:
        args: The run's.
        plan: What `Trainer.set_initial_training_values` returned.
        batch_size: Samples per optimizer update, all ranks together.
        progress: Where a resumed run goes on.
        count_parameters: Counts those that are trained; not called where nobody reads the log.
    """
    if not logger.isEnabledFor(logging.INFO):
        # Counting parameters is not free.
        return
    num_epochs, num_examples, max_steps = plan[0], plan[2], plan[6]
    logger.info("***** Running training *****")
    logger.info("  Num examples = %s", f"{num_examples:,}")
    logger.info("  Num Epochs = %s", "as many as the steps need" if num_epochs == sys.maxsize else f"{num_epochs:,}")
    if plan[5] is not None:
        logger.info("  Num update steps per epoch = %s", f"{plan[1]:,}")
    logger.info("  Instantaneous batch size per device = %s", f"{args.per_device_train_batch_size:,}")
    logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %s", f"{batch_size:,}")
    logger.info("  Gradient Accumulation steps = %d", args.gradient_accumulation_steps)
    logger.info("  Total optimization steps = %s", f"{max_steps:,}")
    logger.info("  Number of trainable parameters = %s", f"{count_parameters():,}")
    if progress.step:
        logger.info("  Continuing from the checkpoint: from epoch %d, global step %d", progress.epoch, progress.step)
        if not args.ignore_data_skip:
            logger.info("  Passing over the first %d batches of that epoch", progress.micro_steps_in_epoch)


def announce_evaluation(loader: Any, *, description: str, batch_size: int, count_samples: Callable[[Any], int]) -> None:
    """Log how much is evaluated."""
    logger.info("***** Running %s *****", description)
    dataset = getattr(loader, "dataset", None)
    is_known = has_length(dataset) or (dataset is None and has_length(loader))
    logger.info("  Num examples = %s", count_samples(loader) if is_known else "unknown")
    logger.info("  Batch size = %d", batch_size)
