"""Configs of data loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.arguments.accelerator import AcceleratorConfig
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.data.sharding import ShardPlan

logger = get_logger(__name__)


def loader_options(args: Any, *, is_training: bool, has_accelerator: bool = False) -> dict[str, Any]:
    """Return the options of a loader, as `build_loader` takes them; memory is pinned only with `has_accelerator`."""
    return {
        "batch_size": args.train_batch_size if is_training else args.eval_batch_size,
        "drop_last": args.dataloader_drop_last,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": bool(args.dataloader_pin_memory and has_accelerator),
        "persistent_workers": bool(args.dataloader_persistent_workers and args.dataloader_num_workers > 0),
        "prefetch_factor": args.dataloader_prefetch_factor,
        "timeout": args.dataloader_timeout,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }


def shard_plan(args: Any, ranks: Any, *, is_training: bool, is_own: bool = True) -> ShardPlan:
    """Return how ranks share data.

    Args:
        ranks: The processes that read different samples: `Strategy.data`.
        is_own: Whether the loader is the Trainer's own, whose evaluation batch size is always per process.
    """
    sharing = read_accelerator_config(args)
    return ShardPlan(
        rank=ranks.rank,
        world_size=ranks.world_size,
        ranks=ranks,
        is_training=is_training,
        seed=data_seed(args),
        even_batches=bool(sharing.get("even_batches", True)),
        split_batches=bool(sharing.get("split_batches", False)) and (is_training or not is_own),
        dispatch_batches=sharing.get("dispatch_batches"),
    )


def total_batch_size(args: Any, *, world_size: int) -> int:
    """Return the samples per optimizer update over all ranks; with `split_batches` the ranks share one batch."""
    is_split = read_accelerator_config(args).get("split_batches", False)
    return int(args.train_batch_size * args.gradient_accumulation_steps * (1 if is_split else world_size))


def length_config(args: Any, *, tool: Any, batch_size: int, is_training: bool) -> Any:
    """Return how samples are ordered by length, None if they are not.

    Args:
        args: The training arguments.
        tool: The processing class; the length is that of the first of its `model_input_names`.
        batch_size: Samples per optimizer update, all ranks together.
        is_training: Whether the data is for training; evaluations are ordered only by `sortish_sampler`.

    Raises:
        ConfigError: `sortish_sampler` and `group_by_length` or `train_sampling_strategy` are both set.
    """
    is_sortish = bool(getattr(args, "sortish_sampler", False))
    is_grouped = args.group_by_length or args.train_sampling_strategy == "group_by_length"
    if is_sortish and (is_grouped or args.train_sampling_strategy != "random"):
        given = (
            "group_by_length=True"
            if args.group_by_length
            else f"train_sampling_strategy={args.train_sampling_strategy!r}"
        )
        raise ConfigError(
            f"Cannot use {given} together with sortish_sampler=True.",
            "Both choose the order of the training data.",
            "Keep one of the two.",
        )
    if not is_sortish and not (is_grouped and is_training):
        return None
    if is_sortish and not is_training and not args.eval_do_concat_batches:
        logger.warning("sortish_sampler leaves evaluations unsorted: eval_do_concat_batches=False keeps their batches.")
        return None
    names = getattr(tool, "model_input_names", None) or ["input_ids"]
    return extra("grouping").LengthConfig(
        input_name=names[0],
        column=args.length_column_name,
        batch_size=batch_size,
        seed=data_seed(args),
        shuffles_batches=is_sortish,
    )


def data_seed(args: Any) -> int:
    """Return the seed of samplers and workers: `data_seed`, else `seed`."""
    return int(args.seed if args.data_seed is None else args.data_seed)


def read_accelerator_config(args: Any) -> Mapping[str, Any]:
    """Return the settings of `accelerator_config` that differ from the defaults.

    Raises:
        ConfigError: The JSON file that it names cannot be read.
    """
    config = args.accelerator_config
    if isinstance(config, (str, Path)):
        config = AcceleratorConfig.from_json_file(config)
    defaults = AcceleratorConfig().to_dict()
    settings = AcceleratorConfig.from_settings(config).to_dict()
    return {name: value for name, value in settings.items() if value != defaults[name]}
