"""The optimizer, the schedule and what shapes the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hftrain.arguments.enums import OptimizerNames, SchedulerType


@dataclass(kw_only=True, repr=False)
class OptimizationArguments:
    """Optimizer and schedule. Source: the documented `TrainingArguments`."""

    learning_rate: float = field(default=5e-5, metadata={"help": "The optimizer's base learning rate."})
    weight_decay: float = field(
        default=0.0, metadata={"help": "Decay of all weights but biases and normalization weights."}
    )
    adam_beta1: float = field(default=0.9, metadata={"help": "Adam's first-moment decay."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Adam's second-moment decay."})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "Adam's epsilon."})
    max_grad_norm: float = field(
        default=1.0, metadata={"help": "Global gradient norm to clip to; 0 or None does not clip."}
    )
    optim: OptimizerNames | str = field(default="adamw_torch", metadata={"help": "The optimizer's name."})
    optim_args: str | None = field(
        default=None, metadata={"help": "Extra optimizer arguments as 'name=value, name=value'."}
    )
    optim_target_modules: list[str] | str | None = field(
        default=None,
        metadata={
            "help": "Linear modules that a low-rank optimizer treats: names, a regular expression, or 'all-linear'."
        },
    )
    lr_scheduler_type: SchedulerType | str = field(
        default="linear", metadata={"help": "The learning-rate schedule's name."}
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default_factory=dict, metadata={"help": "Extra arguments of the schedule, a dict or JSON text."}
    )
    warmup_ratio: float = field(
        default=0.0, metadata={"help": "Share of all optimizer updates during which the learning rate rises from 0."}
    )
    warmup_steps: float = field(
        default=0,
        metadata={
            "help": "Optimizer updates of warmup, or below 1 their share of all; wins over warmup_ratio when positive."
        },
    )
    label_smoothing_factor: float = field(
        default=0.0, metadata={"help": "Probability moved from the true label to all labels alike."}
    )
    neftune_noise_alpha: float | None = field(
        default=None, metadata={"help": "Strength of uniform noise on embeddings while training."}
    )
    adafactor: bool = field(default=False, metadata={"help": "Old form of optim='adafactor'."})
