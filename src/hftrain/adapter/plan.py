"""Length of a run."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from hftrain.core.errors import ConfigError


class TrainPlan(NamedTuple):
    """The length of a run; its fields are in the order that `Trainer.set_initial_training_values` returns.

    Units:
        max_steps, steps_per_epoch: optimizer updates. num_epochs: passes, the last may be partial. num_batches: of
        one rank's loader per pass (None: unknown). num_examples: samples per pass, all ranks. num_samples: samples
        of the whole run. is_by_epochs: whether the epochs, rather than `max_steps`, end the run.
    """

    num_epochs: int
    steps_per_epoch: int
    num_examples: int
    num_samples: int
    is_by_epochs: bool
    num_batches: int | None
    max_steps: int


def train_plan(args: Any, *, num_batches: int | None, num_examples: int, total_batch_size: int) -> TrainPlan:
    """Compute the number of steps that the arguments ask for.

    Args:
        args: The training arguments.
        num_batches: Length of one rank's loader, or None.
        num_examples: Samples in the data, best estimate.
        total_batch_size: Samples per optimizer update, all ranks together.

    Raises:
        ConfigError: The data has no length and `max_steps` is not set.
    """
    max_steps, is_by_epochs = args.max_steps, args.max_steps <= 0
    if num_batches is None:
        require_max_steps(args)
        num_samples = total_batch_size * max_steps
        return TrainPlan(sys.maxsize, max_steps, num_samples, num_samples, is_by_epochs, None, max_steps)
    steps_per_epoch = max(math.ceil(num_batches / args.gradient_accumulation_steps), 1)
    if is_by_epochs:
        max_steps, num_epochs = math.ceil(args.num_train_epochs * steps_per_epoch), math.ceil(args.num_train_epochs)
        num_samples = int(num_examples * args.num_train_epochs)
    else:
        num_epochs, num_samples = math.ceil(max_steps / steps_per_epoch), max_steps * total_batch_size
    return TrainPlan(num_epochs, steps_per_epoch, num_examples, num_samples, is_by_epochs, num_batches, max_steps)


def require_max_steps(args: Any) -> None:
    """Raise unless `max_steps` is set, for data without a length.

    Raises:
        ConfigError: `max_steps` is not set.
    """
    if args.max_steps <= 0:
        raise ConfigError(
            "Cannot train on a dataset without __len__.",
            "Epochs cannot be planned without a length.",
            "Set max_steps to the number of optimizer updates.",
            max_steps=args.max_steps,
        )
