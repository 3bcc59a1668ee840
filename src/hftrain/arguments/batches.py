"""How many samples make a step, and how many steps a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, repr=False)
class BatchArguments:
    """Batch sizes and duration. Source: the documented `TrainingArguments`."""

    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Training samples per device and micro-step."}
    )
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Evaluation samples per device and batch."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-steps per optimizer update."})
    num_train_epochs: float = field(
        default=3.0, metadata={"help": "Passes over the training data; a fraction stops inside the last one."}
    )
    max_steps: int = field(
        default=-1, metadata={"help": "Optimizer updates to train for; wins over num_train_epochs when positive."}
    )
    auto_find_batch_size: bool | str = field(
        default=False,
        metadata={
            "help": "When memory runs out, split the batches into more micro-steps and keep the step as it is; "
            "'smaller_batch' starts again with batches of half the size instead."
        },
    )
    torch_empty_cache_steps: int | None = field(
        default=None,
        metadata={"help": "Optimizer updates between two releases of the device's cached memory; None never does."},
    )
    average_tokens_across_devices: bool | None = field(
        default=True,
        metadata={"help": "Count the loss's items over all processes: exact means when ranks hold unequal numbers."},
    )
    per_gpu_train_batch_size: int | None = field(
        default=None, metadata={"help": "Old name of per_device_train_batch_size."}
    )
    per_gpu_eval_batch_size: int | None = field(
        default=None, metadata={"help": "Old name of per_device_eval_batch_size."}
    )
