"""Checks of the settings alone: invalid values, and settings that contradict each other."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from hftrain.arguments.enums import FOLLOW_METRIC, FSDPOption, HubStrategy, IntervalStrategy, SaveStrategy
from hftrain.arguments.fields import ArgumentFields
from hftrain.core.errors import ConfigError, shorten, suggest
from hftrain.core.lengths import read_length
from hftrain.core.log import get_logger, warn_once

logger = get_logger(__name__)

# The smallest accepted values; None is also accepted, except for settings in _NEEDED.
_COUNTS: dict[str, int] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "torch_empty_cache_steps": 1,
    "eval_accumulation_steps": 1,
    "past_index": -1,
    "save_total_limit": -1,
    "seed": 0,
    "data_seed": 0,
    "local_rank": -1,
    "ddp_bucket_cap_mb": 1,
    "tpu_num_cores": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
}
_RANGES: dict[str, tuple[float, float]] = {
    "learning_rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "num_train_epochs": (-math.inf, math.inf),
    "warmup_ratio": (0, 1),
    "warmup_steps": (0, math.inf),
    "label_smoothing_factor": (0, 1),
    "neftune_noise_alpha": (0, math.inf),
    "eval_delay": (0, math.inf),
    "ddp_timeout": (1, math.inf),
    "dataloader_timeout": (0, math.inf),
}
# Settings that every run reads, so None is not accepted.
_NEEDED = (
    *("adam_beta1", "adam_beta2", "adam_epsilon", "dataloader_num_workers", "dataloader_timeout"),
    *("gradient_accumulation_steps", "learning_rate", "max_steps", "past_index", "per_device_eval_batch_size"),
    *("per_device_train_batch_size", "seed", "warmup_steps", "weight_decay"),
)
# Names in annotations -> the kinds of values, for errors.
_KINDS = {"str": "text", "dict": "a dict", "list": "a list", "int": "a number", "float": "a number"}
_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "log_level": _LEVELS,
    "log_level_replica": _LEVELS,
    "half_precision_backend": ("auto", "cuda_amp", "cpu_amp", "apex"),
    "auto_find_batch_size": (True, False, "smaller_batch"),
    "fp16_opt_level": ("O0", "O1", "O2", "O3"),
    "dataloader_multiprocessing_context": (None, "fork", "spawn", "forkserver"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
    "include_num_input_tokens_seen": (True, False, None, "all", "non_padding"),
}
_INTERVALS = {"logging_steps": "logging_strategy", "eval_steps": "eval_strategy", "save_steps": "save_strategy"}
_HYBRID = (FSDPOption.HYBRID_SHARD, FSDPOption.HYBRID_SHARD_ZERO2)
_SHARDING = (FSDPOption.FULL_SHARD, FSDPOption.SHARD_GRAD_OP, *_HYBRID)
# The settings that need each switch, with the values that have no effect. Without hub_private_repo, which trackers and
# a manual push read, too.
_SWITCHES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gradient_checkpointing": {"gradient_checkpointing_kwargs": (None, {})},
    "use_liger_kernel": {"liger_kernel_config": (None, {})},
    "push_to_hub": {"hub_strategy": (HubStrategy.EVERY_SAVE,), "hub_always_push": (False,)},
}
_OF_WORKERS = (
    *("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"),
    "dataloader_timeout",
)
# Words in the names of metrics, by the `greater_is_better` that they contradict.
_CONTRADICTED = {
    False: {"accuracy", "acc", "auc", "auroc", "bleu", "f", "map", "precision", "recall", "rouge"},
    True: {"cer", "error", "loss", "mae", "mse", "perplexity", "ppl", "rmse", "wer"},
}
_XLA_KEYS = ("xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2")


def _annotation(kind: type, name: str) -> str:
    """Return a field's annotation; not `Field.type`, which transformers' `HfArgumentParser` changes."""
    owners = (vars(each).get("__annotations__", {}) for each in kind.__mro__)
    return next(str(annotations[name]) for annotations in owners if name in annotations)


def check_kinds(args: ArgumentFields) -> None:
    """Raise if a value is of the wrong kind, such as a number or a list in place of text."""
    for field in fields(ArgumentFields):
        value = getattr(args, field.name)
        heads = [part.split("[")[0].strip() for part in _annotation(ArgumentFields, field.name).split("|")]
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        is_list = isinstance(value, (list, tuple)) and "list" not in heads
        if (
            is_list
            or (is_number and not {"int", "float", "bool"} & {*heads})
            or (isinstance(value, type) and "dict" not in heads)
        ):
            kinds = [kind for head, kind in _KINDS.items() if head in heads] or ["True or False"]
            remedy = "Pass an optimizer as Trainer(optimizers=(optimizer, None))." if field.name == "optim" else ""
            raise ConfigError(
                f"Cannot use {field.name}={shorten(value)}:", f"it must be {' or '.join(dict.fromkeys(kinds))}.", remedy
            )


def check_values(args: ArgumentFields) -> None:
    """Raise if a value is invalid regardless of the other settings."""
    for name, smallest in _COUNTS.items():
        _check_number(args, name, smallest, math.inf, kind=Integral)
    for name, (low, high) in _RANGES.items():
        _check_number(args, name, low, high, kind=Real)
    for name, choices in _CHOICES.items():
        _check_choice(name, getattr(args, name), choices)
    for field in fields(args):
        value = getattr(args, field.name)
        if isinstance(value, str) and _annotation(type(args), field.name) in ("bool", "bool | None"):
            raise ConfigError(
                f"Cannot use {field.name}={value!r}.",
                "It must be True or False, not text.",
                "Write it without quotation marks, in YAML too.",
            )
    for choice in args.include_for_metrics:
        _check_choice("include_for_metrics", choice, ("inputs", "loss"))
    for name, strategy in _INTERVALS.items():
        _check_interval(args, name, strategy)
    if args.max_steps <= 0 and not (args.num_train_epochs or 0) > 0:
        raise ConfigError(
            f"Cannot use num_train_epochs={args.num_train_epochs!r}.",
            "A run needs a positive number of epochs or of optimizer updates.",
            "Set num_train_epochs or max_steps above 0; to evaluate only, do not call train().",
        )


def _check_number(args: ArgumentFields, name: str, low: float, high: float, *, kind: Any) -> None:
    value: Any = getattr(args, name)
    is_right = name not in _NEEDED if value is None else isinstance(value, kind) and low <= value <= high
    if is_right:
        return
    sort = "an integer" if kind is Integral else "a number"
    bounds = "" if low == -math.inf else f" of at least {low}" if high == math.inf else f" from {low} to {high}"
    if low == -1:  # -1 means "not set"
        bounds = " above 0, or -1 for no limit" if name == "max_steps" else " from 0, or -1 for none"
    raise ConfigError(f"Cannot use {name}={value!r}:", f"it must be {sort}{bounds}.", _number_remedy(name, value, kind))


def _number_remedy(name: str, value: Any, kind: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return ""
    setting = f"{name}={int(number) if number.is_integer() else number}"
    if isinstance(value, str):
        # YAML 1.1 reads 5e-5 as text.
        hint = "; YAML reads 1e-3 as text, and 1.0e-3 as a number" if "e" in value.lower() else ""
        return f"Write {setting}, without quotation marks{hint}." if kind is Real or number.is_integer() else ""
    if name == "warmup_ratio" and number > 1:
        return f"For a number of steps set warmup_steps={value}."
    return f"Write {setting}." if kind is Integral and isinstance(value, float) and number.is_integer() else ""


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        known = [choice for choice in choices if isinstance(choice, str)]
        reason = f"{name} has no such value."
        raise ConfigError(f"Cannot use {name}={value!r}.", reason, suggest(str(value), known))


def _check_interval(args: ArgumentFields, name: str, strategy: str) -> None:
    value = getattr(args, name)
    if value is None or value == -1 or read_length(value) is not None:
        return
    _check_number(args, name, 0, math.inf, kind=Real)
    if value > 1 and not float(value).is_integer():
        raise ConfigError(
            f"Cannot use {name}={value!r}.",
            "Optimizer updates above 1 are counted in whole numbers; only values below 1 are shares of the run.",
            f"Use {name}={round(value)}, or a value below 1.",
        )
    if value == 0 and getattr(args, strategy) == IntervalStrategy.STEPS:
        raise ConfigError(
            f"Cannot use {strategy}='steps' with {name}=0.",
            "An interval of 0 optimizer updates is not possible.",
            f"Set {name} to 1 or more, to a share of the run below 1, or set {strategy}='no'.",
        )


def check_combinations(args: ArgumentFields) -> None:
    """Raise if settings cannot be combined; warn once about settings without effect."""
    _check_best_model(args)
    _check_followers(args)
    _check_precision(args)
    _check_data(args)
    _check_fsdp(args)
    for switch, names in _SWITCHES.items():
        for name, idle in names.items():
            if not getattr(args, switch) and getattr(args, name) not in idle:
                warn_once(f"{name} has no effect without {switch}=True.")
    if args.deepspeed == {}:
        warn_once("deepspeed={} holds no settings, so it does not choose DeepSpeed; strategy='deepspeed' does.")
    config = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    if not config.get("xla") and any(config.get(key) for key in _XLA_KEYS):
        warn_once("fsdp_config's xla_fsdp_* keys have no effect without the key xla.")
    if args.warmup_steps > 0 and (args.warmup_ratio or 0) > 0:
        logger.info("warmup_steps and warmup_ratio are both given; warmup_steps wins.")


def warn_of_idle(args: ArgumentFields) -> None:
    """Log settings that others make void, and a metric whose name contradicts its direction."""
    # logging_steps and 500 are what eval_strategy='steps' and set_evaluate() fill in.
    if args.eval_strategy != IntervalStrategy.STEPS and args.eval_steps not in (None, -1, 500, args.logging_steps):
        setting, switch = f"eval_steps={args.eval_steps!r}", f"eval_strategy={str(args.eval_strategy)!r}"
        logger.warning(f"{setting} has no effect with {switch}. Set eval_strategy='steps'.")
    if args.max_steps > 0 and args.num_train_epochs not in (None, type(args).num_train_epochs):
        logger.warning(
            f"num_train_epochs={args.num_train_epochs!r} has no effect with max_steps={args.max_steps}, which ends the "
            "training. Leave one of the two out."
        )
    is_greater, words = args.greater_is_better, re.findall(r"[a-z]+", (args.metric_for_best_model or "").lower())
    if is_greater is not None and {*words} & _CONTRADICTED[is_greater]:
        logger.warning(
            f"metric_for_best_model={args.metric_for_best_model!r} with greater_is_better={is_greater} keeps the worst "
            f"model, if the metric is what its name says. Set greater_is_better={not is_greater}."
        )


def _refuse(args: ArgumentFields, reason: str, remedy: str, *names: str) -> ConfigError:
    values = {name: getattr(args, name) for name in names}
    first, *others = [f"{name}={value!r}" for name, value in values.items()]
    asked = f"{first} with {' and '.join(others)}" if others else first
    return ConfigError(f"Cannot use {asked}.", reason, remedy)


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
        _check_steps_meet(args, args.eval_steps or 0, args.save_steps)


def _check_steps_meet(args: ArgumentFields, eval_steps: Any, save_steps: Any) -> None:
    names = ("load_best_model_at_end", "eval_steps", "save_steps")
    if eval_steps == save_steps:
        return
    if isinstance(eval_steps, str) or isinstance(save_steps, str):
        raise _refuse(args, "They may never coincide.", "Write the same text for both.", *names)
    if (eval_steps < 1) != (save_steps < 1):
        reason = "One counts optimizer updates and the other is a share of the run, so they may never coincide."
        raise _refuse(args, reason, "Write both in the same unit.", *names)
    times = save_steps / eval_steps
    # Not compared exactly, because 0.3 / 0.1 is not exactly 3.
    if abs(times - round(times)) > 1e-6 or round(times) < 1:
        reason = "A checkpoint that is saved between two evaluations cannot be ranked."
        raise _refuse(args, reason, "Make save_steps a multiple of eval_steps.", *names)


def _check_followers(args: ArgumentFields) -> None:
    saves_best = args.save_strategy == SaveStrategy.BEST
    if saves_best and args.metric_for_best_model is None:
        reason = "Nothing says which metric is best."
        raise _refuse(args, reason, "Set metric_for_best_model.", "save_strategy", "metric_for_best_model")
    if saves_best and args.eval_strategy == IntervalStrategy.NO:
        reason = "Without evaluation nothing is ever best, so nothing would be saved."
        raise _refuse(args, reason, "Set eval_strategy to 'steps' or 'epoch'.", "save_strategy", "eval_strategy")
    if args.lr_scheduler_type in FOLLOW_METRIC and args.eval_strategy == IntervalStrategy.NO:
        reason = "That schedule follows an evaluation metric."
        raise _refuse(args, reason, "Set eval_strategy to 'steps' or 'epoch'.", "lr_scheduler_type", "eval_strategy")


def _check_precision(args: ArgumentFields) -> None:
    for pair in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if all(getattr(args, name) for name in pair):
            raise _refuse(args, "A run has one half precision.", "Remove one of the two.", *pair)
    if args.half_precision_backend == "apex":
        reason = "NVIDIA removed amp from Apex in May 2025; torch's own mixed precision is its successor."
        raise _refuse(args, reason, "Use fp16=True with half_precision_backend='auto'.", "half_precision_backend")
    if args.use_ipex:
        reason = "Intel has discontinued its extension for PyTorch; torch itself now has its features."
        raise _refuse(args, reason, "Leave it out; bf16=True and torch_compile=True are its successors.", "use_ipex")


def _check_data(args: ArgumentFields) -> None:
    for name in _OF_WORKERS:
        if getattr(args, name) and args.dataloader_num_workers == 0:
            reason = "It configures the data-loading processes, and there are none."
            raise _refuse(args, reason, f"Set dataloader_num_workers, or drop {name}.", name, "dataloader_num_workers")
    if not args.dataloader_in_order:
        reason = "Batches would arrive in the order in which they are ready, so a resume could not find the next one."
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
    if args.gradient_checkpointing and any(option in options for option in (FSDPOption.FULL_SHARD, *_HYBRID)):
        warn_once(
            "gradient_checkpointing gathers fully sharded parameters once more in the backward pass; "
            "fsdp_config={'activation_checkpointing': True} does not."
        )
