"""Checks of the arguments against the strategy and the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hftrain.adapter.data import read_accelerator_config, refused_key, syncs_each_batch
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError, Row, refuse
from hftrain.core.launcher import accelerate_state, read_launch
from hftrain.core.signatures import check_overrides
from hftrain.core.types import Owns
from hftrain.storage.files import check_url, is_url
from hftrain.strategies.base import Strategy, has_engine

# Settings that cast the model for evaluations, or change how these run it.
_NOT_IN_PARTS = ("batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "jit_mode_eval")


def check_strategy(args: TrainingArguments, strategy: Strategy, *, optimizers: tuple[Any, Any]) -> None:
    """Raise if the arguments need something that the strategy does not support; before it is launched."""
    if not type(strategy).__module__.startswith("hftrain."):
        check_overrides(type(strategy), Strategy)
    refuse(_of_devices(args, strategy))
    if has_engine(strategy, "deepspeed"):
        refuse(_of_deepspeed(args, strategy))
    check_url(args.output_dir or "")
    refuse(_of_checkpoints(args, strategy))
    check_configured_state(args, strategy.planned_device)
    if getattr(args, "predict_with_generate", False) and has_engine(strategy, "fsdp"):
        _check_generates(strategy)
    if strategy.shards_model:
        refuse(_of_parts(args, strategy, optimizers))


def _check_generates(strategy: Strategy) -> None:
    if not 1 < strategy.world_size == strategy.sizes.get("tp"):
        is_alone = strategy.data.world_size == 1 < strategy.world_size
        reason = "adds one token at a time, which context ranks and the stages of a pipeline cannot share"
        raise ConfigError(
            f"Cannot use predict_with_generate=True with strategy={strategy.name!r}.",
            f"generate() {reason if is_alone else 'calls the model once a token, as often as its own texts are long'}.",
            "Use strategy='tp', or generate from the saved model, in one process.",
        )


def check_local_rank(args: TrainingArguments) -> None:
    """Raise if `local_rank` differs from the launcher's."""
    launch_rank = read_launch().local_rank
    if args.local_rank not in (-1, launch_rank):
        raise ConfigError(
            f"Cannot use local_rank={args.local_rank}.",
            "The launcher decides the rank, and it does not say so.",
            "Launch with torchrun, and leave local_rank out.",
            launched=launch_rank,
        )


def check_tensor_parallel(size: int, strategy: Strategy, *, is_handled: bool) -> None:
    """Raise if a model's layers are split across processes that would read different data."""
    if size > 1 and not is_handled:
        raise ConfigError(
            f"Cannot use a model whose layers are split over {size} processes.",
            f"With strategy={strategy.name!r} every process reads its own share of the data.",
            "Load the model without a tensor-parallel plan, or use DeepSpeed's tensor_parallel.",
            tp_size=size,
        )


def check_configured_state(args: TrainingArguments, planned_device: torch.device) -> None:
    """Raise for `use_configured_state=True` if accelerate has no state, or one for another device."""
    if not read_accelerator_config(args).get("use_configured_state", False):
        return
    from accelerate import PartialState

    key = "use_configured_state"
    if not accelerate_state("PartialState"):
        remedy = "Make an accelerate.PartialState or Accelerator first, or leave the setting out."
        raise refused_key(key, True, "accelerate has no initialized state.", remedy)
    device = PartialState().device
    if device.type != planned_device.type:
        reason = f"accelerate's state is on {device.type}, and the strategy on {planned_device.type}."
        raise refused_key(key, True, reason, "Make the state with cpu=True for use_cpu=True, and without both else.")


def _of_devices(args: TrainingArguments, strategy: Strategy) -> Iterator[Row]:
    yield (
        args.use_cpu and strategy.device_type != "cpu",
        f"Cannot use use_cpu=True together with strategy={type(strategy).__name__}(...).",
        f"The strategy takes the device {str(strategy.planned_device)!r}.",
        "Make the strategy with use_cpu=True, or leave use_cpu out of the arguments.",
        {"use_cpu": True, "strategy": strategy.name},
    )
    device = {"cpu_amp": "cpu", "cuda_amp": "cuda"}.get(args.half_precision_backend)
    yield (
        device not in (None, strategy.device_type) and (args.fp16 or args.bf16),
        f"Cannot use half_precision_backend={args.half_precision_backend!r}.",
        f"It is that of {device!r}, and this run takes {strategy.device_type!r}.",
        "Leave half_precision_backend at 'auto', which suits the device.",
    )
    yield (
        args.auto_find_batch_size and Owns.ACCUMULATION in strategy.owns,
        f"Cannot use auto_find_batch_size={args.auto_find_batch_size!r} with strategy={strategy.name!r}.",
        "Its engine counts the micro-batches itself and needs their size when it starts.",
        "Set per_device_train_batch_size and gradient_accumulation_steps.",
    )


def _of_deepspeed(args: TrainingArguments, strategy: Strategy) -> Iterator[Row]:
    yield (
        syncs_each_batch(args),
        f"Cannot use accelerator_config's sync_each_batch=True with strategy={strategy.name!r}.",
        "The engine decides when processes exchange gradients: with stage 2 and 3 after each micro-batch anyway.",
        "Leave it out.",
    )
    yield (
        read_accelerator_config(args).get("use_configured_state", False),
        f"Cannot use accelerator_config's use_configured_state=True with strategy={strategy.name!r}.",
        "Cannot use this DeepSpeed config: an accelerate state that was made before does not know it.",
        "Leave it out.",
    )


def _of_checkpoints(args: TrainingArguments, strategy: Strategy) -> Iterator[Row]:
    yield (
        args.save_on_each_node and strategy.shards_model,
        f"Cannot use save_on_each_node=True with strategy={strategy.name!r}.",
        "Each process holds a part of the model, so no machine has all that a checkpoint needs.",
        "Put output_dir on storage that all machines share, and leave save_on_each_node out.",
    )
    yield (
        args.save_on_each_node and is_url(args.output_dir or ""),
        f"Cannot use save_on_each_node=True with output_dir={args.output_dir!r}.",
        "All machines would write the same files of the same store.",
        "Leave save_on_each_node out: a remote folder is one that all machines share.",
    )
    is_split = strategy.shards_model or has_engine(strategy, "deepspeed")
    yield (
        is_split and args.save_only_model and args.load_best_model_at_end,
        f"Cannot use save_only_model=True with load_best_model_at_end=True and strategy={strategy.name!r}.",
        "The best model is loaded into parts that are split among processes, from a complete checkpoint.",
        "Drop one of the two.",
    )


def _of_parts(args: TrainingArguments, strategy: Strategy, optimizers: tuple[Any, Any]) -> Iterator[Row]:
    yield (
        optimizers[0] is not None,
        f"Cannot use optimizers=({type(optimizers[0]).__name__}(...), ...) with strategy={strategy.name!r}.",
        "The strategy splits the parameters, and the given optimizer holds the whole ones.",
        "Pass optimizer_cls_and_kwargs, or override create_optimizer.",
    )
    yield (
        bool(args.auto_find_batch_size) and strategy.world_size > 1,
        f"Cannot use auto_find_batch_size={args.auto_find_batch_size!r} with strategy={strategy.name!r}.",
        "Every forward pass takes all processes: if one runs out of memory, the others wait for it.",
        "Set per_device_train_batch_size; skip_memory_metrics=False logs what a size needs.",
    )
    for setting in _NOT_IN_PARTS:
        yield (
            getattr(args, setting),
            f"Cannot use {setting}=True with strategy={strategy.name!r}.",
            "Each forward pass brings the processes' parts of the parameters together as they are, in step.",
            "Drop it, or use strategy='ddp'.",
        )
