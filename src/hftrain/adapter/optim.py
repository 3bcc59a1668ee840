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
        target_modules=args.optim_target_modules,
        # How many they are follows from the run's length, which is known here only when it is given in steps.
        warmup_steps=args.get_warmup_steps(max(args.max_steps, 0)),
        use_cpu=bool(args.use_cpu),
    )


def schedule_config(args: Any, *, num_training_steps: int) -> ScheduleConfig:
    """Return the learning-rate schedule the arguments ask for."""
    # Beside a constant rate the warm-up is the optimizer's; other schedules do their own as well, as documented.
    warms_up_itself = (
        str(args.optim) in ("schedule_free_adamw", "schedule_free_sgd")
        and str(args.lr_scheduler_type) == "constant"
        and args.get_warmup_steps(max(args.max_steps, 0)) > 0
    )
    return ScheduleConfig(
        name=str(args.lr_scheduler_type),
        num_training_steps=num_training_steps,
        num_warmup_steps=0 if warms_up_itself else args.get_warmup_steps(num_training_steps),
        options=dict(args.lr_scheduler_kwargs or {}),
    )
