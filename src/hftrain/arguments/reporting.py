"""What is logged, when, and to whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hftrain.arguments.enums import DebugOption, IntervalStrategy


@dataclass(kw_only=True, repr=False)
class ReportingArguments:
    """Logging and reporting. Source: the documented `TrainingArguments`."""

    log_level: str = field(
        default="passive",
        metadata={"help": "Level on main processes: debug, info, warning, error, critical; passive leaves it alone."},
    )
    log_level_replica: str = field(
        default="warning", metadata={"help": "Level on all other processes; choices as log_level."}
    )
    log_on_each_node: bool = field(
        default=True, metadata={"help": "Treat the first process of every node as main, not only node 0's."}
    )
    logging_dir: str | None = field(
        default=None, metadata={"help": "TensorBoard folder; a dated folder below output_dir/runs if not given."}
    )
    logging_strategy: IntervalStrategy | str = field(
        default="steps", metadata={"help": "When to log: 'no', 'steps' or 'epoch'."}
    )
    logging_first_step: bool = field(default=False, metadata={"help": "Also log after the first optimizer update."})
    logging_steps: float = field(
        default=500,
        metadata={"help": "Optimizer updates between two logs, or below 1 a share of all; -1: at the end only."},
    )
    logging_nan_inf_filter: bool = field(
        default=True, metadata={"help": "Log the window's mean loss in place of NaN and infinity."}
    )
    report_to: list[str] | str | None = field(
        default=None,
        metadata={"help": "Experiment trackers to report to, 'all' or 'none'; not given: all."},
    )
    disable_tqdm: bool | None = field(
        default=None, metadata={"help": "Show no progress bars; None follows the log level."}
    )
    skip_memory_metrics: bool = field(default=True, metadata={"help": "Do not measure memory."})
    include_tokens_per_second: bool | None = field(
        default=False, metadata={"help": "Report tokens per second and device."}
    )
    include_num_input_tokens_seen: bool | str = field(
        default=False, metadata={"help": "Count input tokens: True or 'all', 'non_padding', False or 'no'."}
    )
    debug: str | list[DebugOption] = field(
        default="", metadata={"help": "What to watch: 'underflow_overflow', 'tpu_metrics_debug'."}
    )
    project: str = field(default="huggingface", metadata={"help": "Project name for Trackio."})
    trackio_space_id: str | None = field(default="trackio", metadata={"help": "Space that Trackio synchronises with."})
    tpu_metrics_debug: bool = field(default=False, metadata={"help": "Old form of debug='tpu_metrics_debug'."})
    trackio_bucket_id: str | None = field(
        default=None, metadata={"help": "Bucket that Trackio's Space keeps its data in; None is Trackio's own choice."}
    )
    # In this order, which transformers' parser of arguments can read.
    trackio_static_space_id: str | None | Literal[False] = field(  # noqa: RUF036
        default=None, metadata={"help": "Static Space that shows the run once it has ended; None or False makes none."}
    )
