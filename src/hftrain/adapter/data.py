"""What the arguments say about data: loaders, shares of ranks, order, micro-batches, and the length of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hftrain.arguments.processes import AcceleratorConfig
from hftrain.core.errors import ConfigError, clash, suggest
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
        tool: The processing class; the length is that of the first of its `model_input_names`.
        is_training: Whether the data is for training; evaluations are ordered only by `sortish_sampler`.

    Raises:
        ConfigError: `sortish_sampler` and `group_by_length` or `train_sampling_strategy` are both set.
    """
    is_sortish = bool(getattr(args, "sortish_sampler", False))
    sampling = args.train_sampling_strategy
    is_grouped = args.group_by_length or sampling == "group_by_length"
    if is_sortish and (is_grouped or sampling != "random"):
        setting = "group_by_length=True" if args.group_by_length else f"train_sampling_strategy={sampling!r}"
        raise clash(setting, "sortish_sampler=True", "Both choose the order of the training data.")
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
    """Return the settings of `accelerator_config` that differ from the defaults."""
    config = args.accelerator_config
    if isinstance(config, (str, Path)):
        config = AcceleratorConfig.from_json_file(config)
    defaults = AcceleratorConfig().to_dict()
    settings = AcceleratorConfig.from_settings(config).to_dict()
    return {name: value for name, value in settings.items() if value != defaults[name]}


class TrainPlan(NamedTuple):
    """The length of a run; its fields are in the order that `Trainer.set_initial_training_values` returns.

    Units:
        max_steps, steps_per_epoch: optimizer updates. num_epochs: passes, the last may be partial. num_batches: of
        one rank's loader per pass (None: unknown). num_examples: samples per pass, all ranks. num_samples: samples
        of the whole run. is_by_epochs: whether the epochs, rather than `max_steps`, end the run.
    """

    num_epochs: int
    steps_per_epoch: int
    num_examples: int
    num_samples: int
    is_by_epochs: bool
    num_batches: int | None
    max_steps: int


def train_plan(args: Any, *, num_batches: int | None, num_examples: int, total_batch_size: int) -> TrainPlan:
    """Compute the number of steps that the arguments ask for."""
    max_steps, is_by_epochs = args.max_steps, args.max_steps <= 0
    if num_batches is None:
        require_max_steps(args)
        num_samples = total_batch_size * max_steps
        return TrainPlan(sys.maxsize, max_steps, num_samples, num_samples, is_by_epochs, None, max_steps)
    steps_per_epoch = max(math.ceil(num_batches / args.gradient_accumulation_steps), 1)
    if is_by_epochs:
        max_steps, num_epochs = math.ceil(args.num_train_epochs * steps_per_epoch), math.ceil(args.num_train_epochs)
        num_samples = int(num_examples * args.num_train_epochs)
    else:
        num_epochs, num_samples = math.ceil(max_steps / steps_per_epoch), max_steps * total_batch_size
    return TrainPlan(num_epochs, steps_per_epoch, num_examples, num_samples, is_by_epochs, num_batches, max_steps)


def require_max_steps(args: Any) -> None:
    """Raise unless `max_steps` is set, for data without a length."""
    if args.max_steps <= 0:
        raise ConfigError(
            "Cannot train on a dataset without __len__.",
            "Epochs cannot be planned without a length.",
            "Set max_steps to the number of optimizer updates.",
            max_steps=args.max_steps,
        )


_SWITCHES = ("split_batches", "even_batches", "use_seedable_sampler", "non_blocking", "use_configured_state")
# Settings that can only be True, and why.
_FIXED = {
    "adjust_scheduler": "The schedule counts optimizer updates, so it is always adjusted to the accumulation.",
    "sync_with_dataloader": "Gradients are never carried into the next epoch: its last update takes what is left.",
}
_ACCUMULATION = ("num_steps", "sync_each_batch", *_FIXED)


def resolve_sharing(args: Any) -> None:
    """Read and check `accelerator_config`; set `gradient_accumulation_steps` to its `num_steps`. Mutates `args`."""
    if isinstance(args.accelerator_config, (str, Path)):
        args.accelerator_config = AcceleratorConfig.from_json_file(args.accelerator_config)
    config = read_accelerator_config(args)
    for key in _SWITCHES:
        if not isinstance(config.get(key, False), bool):
            raise refused_key(key, config[key], "It is neither true nor false.", "Use True or False.")
    if config.get("dispatch_batches") not in (None, True, False):
        reason = "It is neither true, false nor null."
        raise refused_key("dispatch_batches", config["dispatch_batches"], reason, "Use True, False or None.")
    accumulation = _accumulation(config)
    num_steps = accumulation.get("num_steps", args.gradient_accumulation_steps)
    if args.gradient_accumulation_steps not in (1, num_steps):
        reason = f"gradient_accumulation_steps={args.gradient_accumulation_steps} differs from it."
        raise refused_key("num_steps", num_steps, reason, "Keep one of the two.")
    args.gradient_accumulation_steps = num_steps


def syncs_each_batch(args: Any) -> bool:
    """Return whether ranks exchange gradients after each micro-batch, which is slower but needs less memory."""
    return bool(_accumulation(read_accelerator_config(args)).get("sync_each_batch", False))


def non_blocking_copies(args: Any) -> bool | None:
    """Return whether batches are copied to the device without waiting; None leaves it to the strategy."""
    return read_accelerator_config(args).get("non_blocking")


def _accumulation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("gradient_accumulation_kwargs") or {}
    if not isinstance(settings, Mapping):
        reason = "It is not a mapping of settings."
        remedy = "Give a dict, such as {'sync_each_batch': True}."
        raise refused_key("gradient_accumulation_kwargs", settings, reason, remedy)
    for key, value in settings.items():
        if key not in _ACCUMULATION:
            reason = "gradient_accumulation_kwargs has no such key."
            raise refused_key(key, value, reason, suggest(str(key), _ACCUMULATION))
        if key in _FIXED and value is not True:
            raise refused_key(key, value, _FIXED[key], "Leave it out, or set it to True.")
    num_steps = settings.get("num_steps", 1)
    if type(num_steps) is not int or num_steps < 1:
        raise refused_key("num_steps", num_steps, "It counts micro-batches.", "Use a whole number of at least 1.")
    return settings


def refused_key(key: Any, value: Any, reason: str, remedy: str) -> ConfigError:
    """Return the error for an invalid key of `accelerator_config`."""
    return ConfigError(f"Cannot use accelerator_config={{{key!r}: ...}}.", reason, remedy, **{str(key): value})
