"""How long a run is."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.loops.fit import FitConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """The length of a run.

    Units:
        max_steps, steps_per_epoch: optimizer updates. num_epochs: passes, the last may be partial. num_batches: of
        one rank's loader per pass (None: unknown). num_examples: samples per pass, all ranks. num_samples: samples
        of the whole run.
    """

    max_steps: int
    num_epochs: int
    steps_per_epoch: int
    num_batches: int | None
    num_examples: int
    num_samples: int


def train_plan(args: Any, *, num_batches: int | None, num_examples: int, total_batch_size: int) -> TrainPlan:
    """Work out how many steps the arguments ask for.

    Args:
        args: The training arguments.
        num_batches: Length of one rank's loader, or None.
        num_examples: Samples in the data, best estimate.
        total_batch_size: Samples per optimizer update, all ranks together.

    Raises:
        ConfigError: The data has no length and `max_steps` is not set.
    """
    if num_batches is None:
        require_max_steps(args)
        return TrainPlan(
            max_steps=args.max_steps,
            num_epochs=sys.maxsize,
            steps_per_epoch=args.max_steps,
            num_batches=None,
            num_examples=total_batch_size * args.max_steps,
            num_samples=total_batch_size * args.max_steps,
        )
    steps_per_epoch = max(math.ceil(num_batches / args.gradient_accumulation_steps), 1)
    if args.max_steps > 0:
        max_steps, num_epochs = args.max_steps, math.ceil(args.max_steps / steps_per_epoch)
        num_samples = max_steps * total_batch_size
    else:
        max_steps, num_epochs = math.ceil(args.num_train_epochs * steps_per_epoch), math.ceil(args.num_train_epochs)
        num_samples = int(num_examples * args.num_train_epochs)
    return TrainPlan(
        max_steps=max_steps,
        num_epochs=num_epochs,
        steps_per_epoch=steps_per_epoch,
        num_batches=num_batches,
        num_examples=num_examples,
        num_samples=num_samples,
    )


def require_max_steps(args: Any) -> None:
    """Raise unless `max_steps` says how long to train on data without a length.

    Raises:
        ConfigError: It does not.
    """
    if args.max_steps <= 0:
        raise ConfigError(
            "Training on a dataset without __len__ was asked for.",
            "Epochs cannot be planned without a length.",
            "Set max_steps to the number of optimizer updates.",
            max_steps=args.max_steps,
        )


def fit_config(
    args: Any,
    *,
    max_steps: int,
    num_batches: int | None,
    num_epochs: int | None,
    world_size: int,
    num_batches_first: int | None = None,
) -> FitConfig:
    """Return what the training loop needs to know of the arguments."""
    return FitConfig(
        max_steps=max_steps,
        num_epochs=num_epochs,
        accumulation=args.gradient_accumulation_steps,
        num_batches=num_batches,
        num_batches_first=num_batches_first,
        world_size=world_size,
        evaluates_on_start=args.eval_on_start,
        empty_cache_every=args.torch_empty_cache_steps,
    )
