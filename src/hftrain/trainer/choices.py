"""What a Trainer's constructor chooses: arguments, strategy, precision, callbacks and collator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from hftrain.adapter.data import non_blocking_copies, resolve_sharing
from hftrain.adapter.strategy import forget_devices, note_devices, precision_request, strategy_request
from hftrain.arguments.enums import DebugOption
from hftrain.arguments.rules import warn_of_idle
from hftrain.arguments.training import TrainingArguments, resolve
from hftrain.callbacks import TrainerCallback, default_callbacks, progress_callback
from hftrain.callbacks.checks import as_list
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.core.lengths import Length, read_length
from hftrain.core.log import get_verbosity, set_verbosity, warn_once
from hftrain.core.seed import enable_full_determinism, set_seed
from hftrain.data.collators import DataCollatorWithPadding, default_data_collator
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.rules.constructor import check_arguments
from hftrain.rules.strategy import check_local_rank, check_strategy
from hftrain.step.legality import check_legal
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy
from hftrain.task.introspect import is_recomputing
from hftrain.task.module import TaskModule


def begin_process(args: TrainingArguments) -> None:
    """Set the log level and the random numbers of this process."""
    if (args.log_level if args.should_log else args.log_level_replica) != "passive":
        set_verbosity(args.get_process_log_level())
    (enable_full_determinism if args.full_determinism else set_seed)(args.seed)


def number_of_batches(fast_dev_run: bool | int | None) -> int:
    """Return the number of batches per stage of a rehearsal, 0 for a real run; True means one."""
    if fast_dev_run is None or isinstance(fast_dev_run, bool) or (type(fast_dev_run) is int and fast_dev_run >= 0):
        return int(fast_dev_run or 0)
    raise ConfigError(
        f"Cannot use Trainer(fast_dev_run={fast_dev_run!r}).",
        "It says how many batches of every stage to rehearse.",
        "Pass a whole number such as 2, or None for a real run.",
    )


def resolve_arguments(args: TrainingArguments | None) -> TrainingArguments:
    """Check the arguments and fill in dependent values; None means the defaults, with a folder in the working one."""
    args = TrainingArguments("tmp_trainer") if args is None else args
    check_arguments(args)
    resolve(args)
    warn_of_idle(args)
    resolve_sharing(args)
    check_local_rank(args)
    return args


def choose_backends(
    args: TrainingArguments,
    model: Any,
    strategy: str | Strategy | None,
    precision: str | Precision | None,
    *,
    optimizers: tuple[Any, Any],
) -> tuple[Strategy, Precision]:
    """Return strategy and precision; raise for settings that cannot work. Nothing is launched."""
    is_checkpointing = args.gradient_checkpointing or is_recomputing(model)
    forget_devices(args, model)
    is_task = isinstance(model, TaskModule)
    name, options = strategy_request(args, strategy, is_checkpointing=bool(is_checkpointing), is_task=is_task)
    precision_name, precision_options = precision_request(args, precision)
    if not isinstance(strategy, Strategy):
        strategy = create_strategy(name, **options)
    if not isinstance(precision, Precision):
        precision = precisions.create(precision_name, **precision_options)
    note_devices(args, strategy)
    if hasattr(strategy, "fill_config"):
        extra("deepspeed").fill_deepspeed_config(args, strategy, precision)
    check_strategy(args, strategy, optimizers=optimizers)
    check_legal(strategy, precision)
    strategy.non_blocking = non_blocking_copies(args)
    return strategy, precision


def collect_callbacks(
    args: TrainingArguments,
    groups: Sequence[Any],
    *,
    profiler: Any,
    flight_log: Any,
    exclude_samples: Any,
    loggers: Any,
    is_rehearsal: bool,
) -> list[Any]:
    """Return the callbacks of the chosen trackers, followed by the user's; no tracker is started."""
    callbacks = [callback for group in groups for callback in as_list(group)]
    if profiler is not None:
        callbacks += extra("profiler").make_profiler(profiler)
    if flight_log or exclude_samples is not None:
        callbacks += extra("flight_log").make_flight(flight_log, exclude_samples)
    trackers = args.report_to if loggers is None else loggers
    # A Kubeflow TrainJob asks for reports through this variable.
    if trackers in ("none", ["none"], []) and not is_rehearsal and "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ:
        args.report_to = [] if loggers is None else args.report_to
        return list(callbacks)
    return list(extra("trackers").with_trackers(args, callbacks, loggers, is_rehearsal=is_rehearsal))


def with_default_callbacks(
    args: TrainingArguments, strategy: Strategy, callbacks: Sequence[Any], max_time: str | None
) -> list[Any]:
    """Return the default callbacks with the given ones among them."""
    is_hidden = get_verbosity() > 30 if args.disable_tqdm is None else args.disable_tqdm
    progress = progress_callback(disable_tqdm=is_hidden)
    intervals = _intervals(args, max_time)
    interval_callbacks = [extra("intervals").IntervalCallback(intervals, strategy)] if intervals else []
    return [*default_callbacks(), *interval_callbacks, *_debug_callbacks(args, strategy), *callbacks, progress]


def _intervals(args: TrainingArguments, max_time: str | None) -> dict[str, Length]:
    """Return the intervals that steps cannot say, by the flag of the control that they set."""
    flags = {"logging": "should_log", "eval": "should_evaluate", "save": "should_save"}
    lengths = {flag: read_length(getattr(args, f"{name}_steps")) for name, flag in flags.items()}
    is_used = {flag: getattr(args, f"{name}_strategy") == "steps" for name, flag in flags.items()}
    intervals = {flag: length for flag, length in lengths.items() if length is not None and is_used[flag]}
    limit = read_length(max_time)
    if limit is not None and limit.unit in ("s", "tok"):
        intervals["should_training_stop"] = limit
    elif max_time is not None:
        raise ConfigError(
            f"Cannot use Trainer(max_time={max_time!r}).",
            "It ends a run before its planned end, after a time or a number of tokens.",
            "Write '2h', '1h 30min' or '1e9tok'; for passes and updates set num_train_epochs or max_steps.",
        )
    counts = args.include_num_input_tokens_seen and args.logging_strategy != "no"
    for length in (each for each in intervals.values() if each.unit == "tok" and not counts):
        raise ConfigError(
            f"Cannot count {length.text!r}.",
            "Tokens are counted on request, and read when the losses are logged.",
            "Set include_num_input_tokens_seen='all' or 'non_padding', and logging_strategy.",
        )
    return intervals


def default_collator(tool: Any) -> Callable[[list[Any]], Any]:
    """Return a collator that pads with a processing class, or stacks if that cannot pad."""
    pads = hasattr(tool, "pad") and (hasattr(tool, "pad_token_id") or hasattr(tool, "padding_value"))
    return DataCollatorWithPadding(tool) if pads else default_data_collator


def one_of(new_value: Any, old_value: Any, *, new: str, old: str) -> Any:
    """Return a value that was passed under its new or its older name."""
    if old_value is None:
        return new_value
    if new_value is not None:
        raise ConfigError(f"Cannot use both {new} and {old}:", "they are two names of one argument.", f"Keep {new}.")
    warn_once(f"{old} is deprecated; use {new}.", FutureWarning)
    return old_value


def _debug_callbacks(args: TrainingArguments, strategy: Strategy) -> list[TrainerCallback]:
    """Return the callbacks that `debug` selects."""
    if DebugOption.TPU_METRICS_DEBUG not in args.debug:
        return []
    callback = extra("xla_metrics").XLAMetricsCallback()
    if strategy.name != "xla":
        raise ConfigError(
            "Cannot use debug='tpu_metrics_debug'.",
            f"It prints XLA's metrics, and strategy {strategy.name!r} does not run on XLA.",
            "Use strategy='xla', or leave it out.",
            debug=[str(option) for option in args.debug],
        )
    return [callback]
