"""The documented settings of XLA devices, as options of the strategy, and XLA's own metrics."""

from __future__ import annotations

from typing import Any

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError, suggest
from hftrain.core.extras import require
from hftrain.core.log import get_logger
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.extras.engine_settings.fsdp import read_fsdp_config

logger = get_logger(__name__)

# Settings of torch_xla's FSDP wrapper, which needs a process per device: the compiler decides all but the dtypes.
_DECIDED_BY_COMPILER = (
    *("reshard_after_forward", "flatten_parameters", "execute_sharding_on_init", "optimization_barrier_in_forward"),
    *("optimization_barrier_in_backward", "sync_on_finalization", "disable_reshard_on_root", "fp32_reduce_scatter"),
    *("shard_param_on_dim_0", "pin_layout_in_collective_ops", "reduce_scatter_bucket_size_mb"),
    "coalesce_all_gather_ops",
)
_DTYPES = ("compute_dtype", "buffer_dtype")
_READ = ("xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2")
_WRAPPING = ("min_num_params", "transformer_layer_cls_to_wrap")


def xla_options(args: Any) -> dict[str, Any]:
    """Return the options of `XLAStrategy` that the arguments set."""
    options: dict[str, Any] = {}
    if args.tpu_num_cores is not None:
        options["num_devices"] = args.tpu_num_cores
    config = read_fsdp_config(args.fsdp_config)
    if not (args.fsdp and config.get("xla")):
        if args.fsdp:
            raise _refuse("fsdp", args.fsdp, "It needs the key xla on XLA devices.", "Set fsdp_config={'xla': True}.")
        return options
    if unknown := [str(word) for word in args.fsdp if str(word) not in ("full_shard", "auto_wrap")]:
        reason = f"{unknown[0]!r} is not among the ways in which the XLA compiler splits a model."
        raise _refuse("fsdp", [*map(str, args.fsdp)], reason, "Use 'full_shard', with or without 'auto_wrap'.")
    _check_settings(args, config.get("xla_fsdp_settings", {}))
    if config.get("activation_checkpointing"):
        remedy = "Use the key xla_fsdp_grad_ckpt."
        raise _refuse("fsdp_config", "activation_checkpointing", "It has another name on XLA devices.", remedy)
    if config.get("xla_fsdp_grad_ckpt") and args.gradient_checkpointing:
        reason = "gradient_checkpointing=True recomputes the same activations."
        raise _refuse("fsdp_config", "xla_fsdp_grad_ckpt", reason, "Keep one of the two.")
    unused = [key for key in config if key not in (*_READ, *_WRAPPING)]
    if unused:
        logger.warning("The XLA compiler decides about %s: these keys of fsdp_config change nothing.", unused)
    names = config.get("transformer_layer_cls_to_wrap")
    return {
        **options,
        "shards": True,
        "layer_classes": [name.strip() for name in names.split(",")] if isinstance(names, str) else names,
        "min_num_params": int(config.get("min_num_params", 0)),
        "recomputes": bool(config.get("xla_fsdp_grad_ckpt")),
    }


class XLAMetricsCallback(TrainerCallback):
    """Print XLA's own metrics after every epoch and evaluation, on the first process.

    Source: the documented `debug="tpu_metrics_debug"`.
    """

    def __init__(self) -> None:
        require("torch_xla", feature="debug='tpu_metrics_debug'", extra="xla")

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        import torch_xla.debug.metrics

        if state.is_world_process_zero:
            print(torch_xla.debug.metrics.metrics_report(), flush=True)

    on_evaluate = on_epoch_end


def _check_settings(args: Any, settings: Any) -> None:
    if not isinstance(settings, dict):
        raise _refuse("xla_fsdp_settings", settings, "It is a dict of options.", "Give a dict.")
    for key, value in settings.items():
        if key not in (*_DECIDED_BY_COMPILER, *_DTYPES):
            remedy = suggest(key, (*_DECIDED_BY_COMPILER, *_DTYPES))
            raise _refuse("xla_fsdp_settings", settings, f"There is no option {key!r}.", remedy)
        expected = "bfloat16" if args.bf16 and key == "compute_dtype" else "float32"
        dtype = str(value).removeprefix("torch.")
        if key in _DTYPES and dtype != expected:
            reason = f"{key}={dtype!r} is not what the precision says, which is {expected!r}."
            remedy = "Use bf16=True, which computes in bfloat16 and keeps buffers in float32, and leave it out."
            raise _refuse("xla_fsdp_settings", settings, reason, remedy)
    ignored = [key for key in settings if key in _DECIDED_BY_COMPILER]
    if ignored:
        logger.warning("The XLA compiler decides about %s: these xla_fsdp_settings change nothing.", ignored)


def _refuse(name: str, value: Any, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"Cannot use {name}={value!r}.", reason, remedy)
