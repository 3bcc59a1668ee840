"""The configs of other packages, built from the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hftrain.adapter.data import read_accelerator_config
from hftrain.core.log import warn_once
from hftrain.loops.evaluate import EvaluateConfig
from hftrain.optim.optimizers import OptimizerConfig
from hftrain.optim.schedules import ScheduleConfig
from hftrain.strategies.environment import is_set, launched
from hftrain.task.compilation import CompileConfig

# The settings listed in a model card.
_TOLD = (
    "learning_rate", "train_batch_size", "eval_batch_size", "gradient_accumulation_steps", "seed", "optim",
    "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "lr_scheduler_type",
    "warmup_steps", "warmup_ratio", "label_smoothing_factor",
)  # fmt: skip
_LOADER_SETTINGS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")


def optimizer_config(args: Any) -> OptimizerConfig:
    """Return the config of the optimizer that the arguments select."""
    return OptimizerConfig(
        name=str(args.optim),
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        options=args.optim_args,
        target_modules=args.optim_target_modules,
        # A warm-up ratio needs the run's length, which is known here only if it is set in steps.
        warmup_steps=args.get_warmup_steps(max(args.max_steps, 0)),
        use_cpu=bool(args.use_cpu),
    )


def schedule_config(args: Any, *, num_training_steps: int) -> ScheduleConfig:
    """Return the config of the learning-rate schedule that the arguments select."""
    # With a constant rate the optimizer does the warm-up; other schedules also do their own, as documented.
    warms_up_itself = (
        str(args.optim) in ("schedule_free_adamw", "schedule_free_sgd")
        and str(args.lr_scheduler_type) == "constant"
        and args.get_warmup_steps(max(args.max_steps, 0)) > 0
    )
    return ScheduleConfig(
        name=str(args.lr_scheduler_type),
        num_training_steps=num_training_steps,
        num_warmup_steps=0 if warms_up_itself else args.get_warmup_steps(num_training_steps),
        options=dict(args.lr_scheduler_kwargs or {}),
    )


def evaluate_config(
    args: Any,
    *,
    keeps_predictions: bool,
    input_name: str,
    returns_predictions: bool = True,
) -> EvaluateConfig:
    """Return the config of an evaluation: what it keeps and passes to `compute_metrics`."""
    return EvaluateConfig(
        keeps_predictions=keeps_predictions and not args.batch_eval_metrics,
        moves_every=args.eval_accumulation_steps,
        joins_batches=args.eval_do_concat_batches,
        computes_per_batch=args.batch_eval_metrics,
        includes=tuple(args.include_for_metrics),
        input_name=input_name,
        takes_objects=args.eval_use_gather_object,
        returns_predictions=returns_predictions,
    )


def full_eval_dtype(args: Any) -> torch.dtype | None:
    """Return the dtype to evaluate entirely in, None for the model's own."""
    if args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if args.fp16_full_eval else None


def generation_options(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `generate` for a call: those given, then those of the training arguments.

    Args:
        given: The keyword arguments of `evaluate` or `predict`; None counts as not given. A `generation_config` among
            them replaces all settings of the training arguments.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if "generation_config" not in chosen:
        if "max_new_tokens" not in chosen and args.generation_max_length is not None:
            chosen.setdefault("max_length", args.generation_max_length)
        if args.generation_num_beams is not None:
            chosen.setdefault("num_beams", args.generation_num_beams)
    return chosen


def compile_config(args: Any) -> CompileConfig | None:
    """Return the config of compilation, None if it is off.

    If the arguments do not set it, `accelerate launch --dynamo_backend` decides.
    """
    if args.torch_compile:
        backend, mode = args.torch_compile_backend or "inductor", args.torch_compile_mode
    else:
        backend, mode = launched("ACCELERATE_DYNAMO_BACKEND").lower(), launched("ACCELERATE_DYNAMO_MODE") or None
        if backend in ("no", ""):
            return None
        for option in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION"):
            if is_set(f"ACCELERATE_DYNAMO_USE_{option}"):
                warn_once(f"dynamo_use_{option.lower()} of accelerate's configuration changes nothing here.")
    if mode not in (None, "default") and backend != "inductor":
        warn_once(
            f"torch_compile_mode={mode!r} is an option of inductor; torch_compile_backend={backend!r} may ignore it."
        )
    return CompileConfig(backend=backend, mode=mode)


def told_hyperparameters(args: Any) -> dict[str, Any]:
    """Return the settings to list in a model card: those that are set, and the length of the training."""
    told = {name: getattr(args, name) for name in _TOLD if getattr(args, name)}
    length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}
    return {**told, **length}


def accelerator_settings(args: Any, policy: Any, *, device_type: str) -> tuple[str, dict[str, Any]]:
    """Return the mixed precision by accelerate's name, and the loader settings.

    On the CPU fp16 is passed as "no", because accelerate does not support it there, while torch does.
    """
    sharing = read_accelerator_config(args)
    names = {"float16": "fp16", "bfloat16": "bf16"}
    mixed = names.get(str(policy.compute_dtype).removeprefix("torch."), "no") if policy.autocast else "no"
    if device_type == "cpu" and mixed == "fp16":
        mixed = "no"
    # As documented, the order depends on the seed; accelerate's own default draws it from the global generator.
    loading = {"use_seedable_sampler": True, **{k: sharing[k] for k in _LOADER_SETTINGS if k in sharing}}
    return mixed, {**loading, "data_seed": args.data_seed}
