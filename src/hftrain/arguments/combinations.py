"""Settings that contradict one another, or that have no effect together."""

from __future__ import annotations

from typing import Any

from hftrain.arguments.enums import FOLLOW_METRIC, FSDPOption, HubStrategy, IntervalStrategy, SaveStrategy
from hftrain.arguments.fields import ArgumentFields
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger, warn_once

_HYBRID = (FSDPOption.HYBRID_SHARD, FSDPOption.HYBRID_SHARD_ZERO2)
_SHARDING = (FSDPOption.FULL_SHARD, FSDPOption.SHARD_GRAD_OP, *_HYBRID)
# What each switch turns on, with the values that ask for nothing.
_SWITCHES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gradient_checkpointing": {"gradient_checkpointing_kwargs": (None, {})},
    "use_liger_kernel": {"liger_kernel_config": (None, {})},
    "push_to_hub": {"hub_strategy": (HubStrategy.EVERY_SAVE,), "hub_always_push": (False,)},
}
_XLA_KEYS = ("xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2")


def check_combinations(args: ArgumentFields) -> None:
    """Refuse settings that cannot work together; warn once about those that have no effect together.

    Raises:
        ConfigError: Two settings contradict one another; both are named.
    """
    _check_best_model(args)
    _check_save_best(args)
    _check_plateau(args)
    _check_precision(args)
    _check_workers(args)
    _check_order(args)
    _check_fsdp(args)
    _check_checkpointing(args)
    _warn_of_idle(args)
    if args.warmup_steps > 0 and (args.warmup_ratio or 0) > 0:
        get_logger(__name__).info("warmup_steps and warmup_ratio are both given; warmup_steps wins.")


def _warn_of_idle(args: ArgumentFields) -> None:
    """Warn of settings whose switch is off. hub_private_repo is none: a push by hand reads it, and so do trackers."""
    for switch, names in _SWITCHES.items():
        for name, idle in names.items():
            if not getattr(args, switch) and getattr(args, name) not in idle:
                warn_once(f"{name} has no effect without {switch}=True.")
    if args.deepspeed == {}:
        warn_once("deepspeed={} holds no settings, so it does not choose DeepSpeed; strategy='deepspeed' does.")
    config = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    if not config.get("xla") and any(config.get(key) for key in _XLA_KEYS):
        warn_once("fsdp_config's xla_fsdp_* keys have no effect without the key xla.")


def _refuse(args: ArgumentFields, reason: str, remedy: str, *names: str) -> ConfigError:
    values = {name: getattr(args, name) for name in names}
    asked = " with ".join(f"{name}={value!r}" for name, value in values.items())
    return ConfigError(f"{asked} was asked for.", reason, remedy, **values)


def _check_best_model(args: ArgumentFields) -> None:
    if not args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        return
    if args.save_steps == -1 and args.save_strategy == SaveStrategy.NO:
        reason = "save_steps=-1 saves nothing, so there is nothing to load."
        raise _refuse(args, reason, "Set save_steps.", "load_best_model_at_end", "save_steps")
    names = ("load_best_model_at_end", "eval_strategy", "save_strategy")
    if args.eval_strategy == IntervalStrategy.NO:
        reason = "Without evaluation no checkpoint is best."
        raise _refuse(args, reason, "Set eval_strategy and save_strategy to 'steps' or both to 'epoch'.", *names)
    if args.eval_strategy != args.save_strategy:
        reason = "Each checkpoint must be evaluated for the best one to be known."
        raise _refuse(args, reason, f"Set save_strategy={str(args.eval_strategy)!r}.", *names)
    if args.eval_strategy == IntervalStrategy.STEPS:
        _check_best_model_steps(args, args.eval_steps or 0, args.save_steps)


def _check_best_model_steps(args: ArgumentFields, eval_steps: float, save_steps: float) -> None:
    names = ("load_best_model_at_end", "eval_steps", "save_steps")
    if (eval_steps < 1) != (save_steps < 1):
        reason = "One counts optimizer updates and the other is a share of the run, so they need not meet."
        raise _refuse(args, reason, "Write both in the same unit.", *names)
    times = save_steps / eval_steps
    # Shares are binary fractions: 0.3 / 0.1 is not exactly 3.
    if abs(times - round(times)) > 1e-6 or round(times) < 1:
        reason = "A checkpoint that is saved between two evaluations cannot be ranked."
        raise _refuse(args, reason, "Make save_steps a multiple of eval_steps.", *names)


def _check_save_best(args: ArgumentFields) -> None:
    if args.save_strategy != SaveStrategy.BEST:
        return
    if args.metric_for_best_model is None:
        reason = "Nothing says which metric is best."
        raise _refuse(args, reason, "Set metric_for_best_model.", "save_strategy", "metric_for_best_model")
    if args.eval_strategy == IntervalStrategy.NO:
        reason = "Without evaluation nothing is ever best, so nothing would be saved."
        raise _refuse(args, reason, "Set eval_strategy to 'steps' or 'epoch'.", "save_strategy", "eval_strategy")


def _check_plateau(args: ArgumentFields) -> None:
    if args.lr_scheduler_type in FOLLOW_METRIC and args.eval_strategy == IntervalStrategy.NO:
        reason = "That schedule follows an evaluation metric."
        raise _refuse(args, reason, "Set eval_strategy to 'steps' or 'epoch'.", "lr_scheduler_type", "eval_strategy")


def _check_precision(args: ArgumentFields) -> None:
    for pair in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if all(getattr(args, name) for name in pair):
            raise _refuse(args, "A run has one half precision.", "Keep one of the two.", *pair)
    if args.half_precision_backend == "apex":
        reason = "NVIDIA removed amp from Apex in May 2025; torch's own mixed precision is its successor."
        raise _refuse(args, reason, "Use fp16=True with half_precision_backend='auto'.", "half_precision_backend")
    if args.use_ipex:
        reason = "Intel has discontinued its extension for PyTorch; torch itself now has its features."
        raise _refuse(args, reason, "Leave it out; bf16=True and torch_compile=True are its successors.", "use_ipex")


def _check_workers(args: ArgumentFields) -> None:
    if args.dataloader_num_workers > 0:
        return
    for name in (
        "dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context",
    ):  # fmt: skip
        if getattr(args, name):
            reason = "It concerns loading processes, and there are none."
            raise _refuse(args, reason, f"Set dataloader_num_workers, or drop {name}.", name, "dataloader_num_workers")


def _check_order(args: ArgumentFields) -> None:
    if not args.dataloader_in_order:
        reason = "Batches would come in the order in which they are ready, so a resume could not find the next one."
        raise _refuse(args, reason, "Leave it True.", "dataloader_in_order")
    if args.train_sampling_strategy == "batch_rebalance":
        reason = "Its batches have unequal sizes, but a resume finds its position by counting batches of one size."
        raise _refuse(args, reason, "Use train_sampling_strategy='group_by_length'.", "train_sampling_strategy")
    if args.group_by_length and args.train_sampling_strategy == "sequential":
        reason = "Both choose the order of the training data."
        raise _refuse(args, reason, "Keep one of the two.", "group_by_length", "train_sampling_strategy")


def _check_fsdp(args: ArgumentFields) -> None:
    options = args.fsdp or []
    if options and args.deepspeed is not None:
        reason = "Both decide how the model is shared between processes."
        raise _refuse(args, reason, "Keep one of the two.", "fsdp", "deepspeed")
    if FSDPOption.OFFLOAD in options and not any(option in options for option in _SHARDING):
        reason = "Only what is sharded can be offloaded."
        raise _refuse(args, reason, "Add 'full_shard' or 'shard_grad_op'.", "fsdp")
    shardings = [str(option) for option in options if option in (*_SHARDING, FSDPOption.NO_SHARD)]
    if len(shardings) > 1:
        raise _refuse(args, "A model is sharded in one way.", f"Keep one of {', '.join(shardings)}.", "fsdp")


def _check_checkpointing(args: ArgumentFields) -> None:
    if not args.gradient_checkpointing:
        return
    if any(option in (args.fsdp or []) for option in (FSDPOption.FULL_SHARD, *_HYBRID)):
        warn_once(
            "gradient_checkpointing gathers fully sharded parameters once more in the backward pass; "
            "fsdp_config={'activation_checkpointing': True} does not."
        )
