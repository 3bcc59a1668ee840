"""Checkpoints: when, what, how many, and which one is best."""

from __future__ import annotations

from dataclasses import dataclass, field

from hftrain.arguments.enums import SaveStrategy


@dataclass(kw_only=True, repr=False)
class SavingArguments:
    """Saving. Source: the documented `TrainingArguments`."""

    save_strategy: SaveStrategy | str = field(
        default="steps", metadata={"help": "When to save: 'no', 'steps', 'epoch' or 'best'."}
    )
    save_steps: float = field(
        default=500,
        metadata={"help": "Optimizer updates between two checkpoints, or below 1 a share of all; -1: never save."},
    )
    save_total_limit: int | None = field(
        default=None,
        metadata={"help": "Checkpoints to keep; older ones are deleted, the best one never. None keeps all."},
    )
    save_safetensors: bool | None = field(
        default=True, metadata={"help": "Write safetensors files instead of pickled state dicts."}
    )
    save_on_each_node: bool = field(
        default=False, metadata={"help": "Save on every node; never with storage that the nodes share."}
    )
    save_only_model: bool = field(
        default=False, metadata={"help": "Save no optimizer, schedule or random state; such a run cannot be resumed."}
    )
    enable_jit_checkpoint: bool = field(
        default=False, metadata={"help": "Save on SIGTERM; every run that saves checkpoints does so anyway."}
    )
    restore_callback_states_from_checkpoint: bool = field(
        default=False, metadata={"help": "On resume, replace callbacks by those saved in the checkpoint."}
    )
    load_best_model_at_end: bool | None = field(
        default=False, metadata={"help": "Load the best checkpoint when training ends."}
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata={
            "help": "Metric that ranks checkpoints, with or without 'eval_'; 'loss' with load_best_model_at_end."
        },
    )
    greater_is_better: bool | None = field(
        default=None, metadata={"help": "Whether a larger metric is better; unless it ends in 'loss'."}
    )
    ignore_data_skip: bool = field(default=False, metadata={"help": "On resume, do not skip the data already seen."})
