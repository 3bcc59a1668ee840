"""Which optimizer and which schedule."""

from __future__ import annotations

from typing import Any

from hftrain.optim.optimizers import OptimizerConfig
from hftrain.optim.schedules import ScheduleConfig


def optimizer_config(args: Any) -> OptimizerConfig:
    """Return the optimizer the arguments ask for."""
    return OptimizerConfig(
        name=str(args.optim),
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        options=args.optim_args,
    )


def schedule_config(args: Any, *, num_training_steps: int) -> ScheduleConfig:
    """Return the learning-rate schedule the arguments ask for."""
    return ScheduleConfig(
        name=str(args.lr_scheduler_type),
        num_training_steps=num_training_steps,
        num_warmup_steps=args.get_warmup_steps(num_training_steps),
        options=dict(args.lr_scheduler_kwargs or {}),
    )
