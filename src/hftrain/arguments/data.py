"""How batches are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, repr=False)
class DataArguments:
    """Data loading. Source: the documented `TrainingArguments`."""

    dataloader_drop_last: bool = field(default=False, metadata={"help": "Drop the last batch when it is not full."})
    dataloader_num_workers: int = field(
        default=0, metadata={"help": "Loading processes per rank; 0 loads in the training process."}
    )
    dataloader_pin_memory: bool = field(
        default=True, metadata={"help": "Load into page-locked memory; off with use_cpu."}
    )
    dataloader_persistent_workers: bool = field(
        default=False, metadata={"help": "Keep loading processes alive between epochs."}
    )
    dataloader_prefetch_factor: int | None = field(
        default=None, metadata={"help": "Batches that each loading process prepares ahead."}
    )
    dataloader_multiprocessing_context: str | None = field(
        default=None,
        metadata={"help": "How loading processes start: 'fork', 'spawn' or 'forkserver'; None is Python's own choice."},
    )
    dataloader_in_order: bool = field(
        default=True, metadata={"help": "Take batches in their order; False is refused: no resume could be exact."}
    )
    train_sampling_strategy: str = field(
        default="random",
        metadata={"help": "Order of the training data: 'random', 'sequential' or 'group_by_length'."},
    )
    remove_unused_columns: bool | None = field(
        default=True,
        metadata={"help": "Drop dataset columns that the model's forward does not take; with a task, text columns."},
    )
    group_by_length: bool = field(
        default=False, metadata={"help": "Put samples of similar length into the same batch."}
    )
    length_column_name: str | None = field(
        default="length", metadata={"help": "Dataset column with the lengths for group_by_length."}
    )
