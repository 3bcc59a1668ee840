"""Choice of the strategy, its options and the precision, by the arguments and the launcher."""

from __future__ import annotations

import os
from typing import Any

from hftrain.arguments.enums import ParallelMode
from hftrain.core.errors import ConfigError, clash
from hftrain.core.extras import extra
from hftrain.core.launcher import is_set, lacks_processes, launched, read_launch
from hftrain.core.log import get_logger, warn_once
from hftrain.core.parameters import is_weightless
from hftrain.core.signatures import accepts
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import accepted_options, strategies
from hftrain.task.introspect import is_on_several_devices

logger = get_logger(__name__)

_DEFAULT_TIMEOUT_S = 1800
# Variables that `accelerate launch` sets for the engines it can configure.
FSDP_LAUNCHED, DEEPSPEED_LAUNCHED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
_LAUNCHER_ENGINES = {
    FSDP_LAUNCHED: "fsdp",
    DEEPSPEED_LAUNCHED: "deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm",
}
_STRATEGY_FIELDS = ("deepspeed", "fsdp", "sharded_ddp", "tpu_num_cores")


def strategy_request(
    args: Any, strategy: str | Strategy | None, *, is_checkpointing: bool, is_task: bool = False
) -> tuple[str, dict[str, Any]]:
    """Return the strategy's registry name and options.

    Args:
        strategy: The `strategy=` keyword; None and ``"auto"`` leave the choice to the arguments and the launcher. An
            object keeps its own options.
        is_checkpointing: Whether the model recomputes activations (decides `find_unused_parameters`, as documented).
        is_task: Whether the model is a TaskModule, which has no documented `find_unused_parameters` to keep.
    """
    _check_sagemaker(args)
    _check_kind(strategy)
    is_object = isinstance(strategy, Strategy)
    explicit_name = _name_of(strategy)
    _check_fields(args, strategy)
    _check_launcher(strategy)
    mesh_name, mesh_options = _mesh(args, strategy)
    name = explicit_name or mesh_name or _automatic(args)
    engines = _engines_of(strategy if is_object else name)
    options = _process_options(args)
    if "fsdp" in engines:
        options.update(extra("fsdp").fsdp_options(args, explicit_name))
        name = "fsdp" if name == "fsdp1" else name
        options.update(mesh_options)
    elif args.fsdp_config and not args.fsdp:
        logger.warning("fsdp_config has no effect with strategy=%r: set fsdp too, or strategy='fsdp'.", name)
    if "deepspeed" in engines:
        options.update(extra("deepspeed").deepspeed_options(args))
    if "xla" in engines:
        options.update(extra("xla").xla_options(args))
    options = {option: value for option, value in options.items() if value is not None}
    if not is_object:
        _check_preset(name, options)
    names = set() if is_object else accepted_options(name)  # None: any
    ignored = [] if names is None else sorted(options.keys() - names)
    if ignored:
        logger.warning(
            "strategy=%r %s, so these settings change nothing: %s.",
            name,
            "was given as an object" if is_object else "does not take them",
            ", ".join(f"{option}={options[option]!r}" for option in ignored),
        )
    # Documented defaults; a strategy chosen by name has its own for some.
    defaults: dict[str, Any] = {"use_cpu": args.use_cpu, "place_model": bool(args.place_model_on_device)}
    if explicit_name is None:
        defaults["find_unused_parameters"] = not (is_checkpointing or is_task)
    if is_checkpointing:
        defaults["broadcast_buffers"] = False
    return name, {
        option: value for option, value in {**defaults, **options}.items() if names is None or option in names
    }


def _process_options(args: Any) -> dict[str, Any]:
    return {
        "backend": args.ddp_backend,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "static_graph": args.ddp_static_graph,
        "timeout_s": None if args.ddp_timeout == _DEFAULT_TIMEOUT_S else args.ddp_timeout,
    }


def forget_devices(args: Any, model: Any) -> None:
    """Make the arguments count devices again; a model spread over several counts as one. Mutates `args`."""
    vars(args).pop("_n_gpu", None)
    if model is not None and any(map(is_on_several_devices, (model, getattr(model, "model", model)))):
        vars(args)["_n_gpu"] = min(args.n_gpu, 1)


def note_devices(args: Any, strategy: Strategy) -> None:
    """Set the arguments' number of devices to the strategy's, since batch sizes are per device. Mutates `args`."""
    num = getattr(strategy, "num_devices", 1)
    if max(args.n_gpu, 1) != num:
        vars(args)["_n_gpu"] = num


def _check_sagemaker(args: Any) -> None:
    """Raise for SageMaker's own runtimes and its start without torchrun: processes would each train alone."""
    fsdp, ddp = "fsdp='full_shard' (or deepspeed=...), which splits the model", "strategy='ddp'"
    hosts = os.environ.get("SM_HOSTS", "").split(",")
    if (args.mp_parameters or "{}").strip() not in ("", "{}"):
        error, kind, remedy = f"Cannot use mp_parameters={args.mp_parameters!r}.", "model-parallel runtime", fsdp
    elif args.parallel_mode == ParallelMode.SAGEMAKER_MODEL_PARALLEL:
        error, kind, remedy = "SM_HP_MP_PARAMETERS asks for model parallelism.", "model-parallel runtime", fsdp
    elif args.parallel_mode == ParallelMode.SAGEMAKER_DATA_PARALLEL:
        error, kind, remedy = "SM_FRAMEWORK_PARAMS asks for data parallelism.", "data-parallel runtime", ddp
    elif len(hosts) > 1 and read_launch().launcher is None:
        error, kind, remedy = f"SM_HOSTS lists {len(hosts)} machines.", "start of one script per machine", ddp
    else:
        return
    raise ConfigError(
        error,
        f"SageMaker's {kind} is not supported.",
        f"Launch with torchrun (distribution={{'torch_distributed': {{'enabled': True}}}}) and use {remedy}.",
    )


def _check_kind(strategy: Any) -> None:
    if strategy is None or isinstance(strategy, Strategy) or (isinstance(strategy, str) and strategy):
        return
    label = strategy.__name__ if isinstance(strategy, type) else repr(strategy)
    raise ConfigError(
        f"Cannot use strategy={label}.",
        "It is a class." if isinstance(strategy, type) else "It is neither a name nor a strategy.",
        f"Pass an object ({label}())." if isinstance(strategy, type) else "Pass a name, an object, or nothing.",
    )


def _engines_of(strategy: str | Strategy | None) -> set[str]:
    """Return the names of a strategy's class and base classes: the engines whose settings it takes."""
    if strategy in (None, "auto"):
        return set()
    kind = type(strategy) if isinstance(strategy, Strategy) else strategies.resolve(str(strategy))[0]
    return {str(vars(each).get("name", "")) for each in getattr(kind, "__mro__", ())}


def _check_fields(args: Any, strategy: str | Strategy | None) -> None:
    explicit_name = _name_of(strategy)
    for field in _STRATEGY_FIELDS:
        value = getattr(args, field, None)
        if explicit_name is None or not value:
            continue
        is_xla = field == "tpu_num_cores" or (field == "fsdp" and _has_xla_config(args))
        implied_name = "xla" if is_xla else "deepspeed" if field == "deepspeed" else "fsdp"
        # A DeepSpeed object has its own config.
        has_config = field == "deepspeed" and isinstance(strategy, Strategy)
        if has_config or implied_name not in _engines_of(strategy):
            reason = f"Both choose how processes share the model, and {field} means another strategy."
            raise clash(f"strategy={explicit_name!r}", f"{field}={value!r}", reason)


def _mesh(args: Any, strategy: str | Strategy | None) -> tuple[str | None, dict[str, Any]]:
    """Return the strategy and the options that `parallelism_config` selects; None and no options without it."""
    request, explicit_name = mesh_request(args), _name_of(strategy)
    if request is None:
        return None, {}
    if explicit_name is not None and request[0] not in _engines_of(strategy):
        reason = f"Its sizes mean strategy={request[0]!r}."
        raise clash(f"strategy={explicit_name!r}", "parallelism_config", reason)
    return request


def _automatic(args: Any) -> str:
    is_tpu = os.environ.get("PJRT_DEVICE", "").upper() == "TPU" and not args.use_cpu
    if args.tpu_num_cores or (args.fsdp and _has_xla_config(args)) or is_tpu:
        return "xla"
    if args.deepspeed or is_set(DEEPSPEED_LAUNCHED):
        return "deepspeed"
    if args.fsdp or is_set(FSDP_LAUNCHED):
        return "fsdp"
    return "ddp" if args.world_size > 1 else "data_parallel" if args.n_gpu > 1 else "single"


def _has_xla_config(args: Any) -> bool:
    return bool(args.fsdp_config and extra("fsdp").read_fsdp_config(args.fsdp_config).get("xla"))


def _name_of(strategy: str | Strategy | None) -> str | None:
    if isinstance(strategy, Strategy):
        return strategy.name or type(strategy).__name__
    return None if strategy == "auto" else strategy


def _check_preset(name: str, wanted: dict[str, Any]) -> None:
    for option, value in strategies.resolve(name)[1].items():
        if wanted.get(option, value) != value:
            shown = f"ddp_{option}" if option in ("find_unused_parameters", "static_graph") else option
            reason = f"The name means {option}={value!r}."
            raise clash(f"strategy={name!r}", f"{shown}={wanted[option]!r}", reason)


def _check_launcher(strategy: str | Strategy | None) -> None:
    """Raise if `accelerate launch` was set to another engine than the chosen strategy's."""
    if lacks_processes() and _name_of(strategy) != "single":
        raise ConfigError(
            "`accelerate launch` has several processes to start.",
            "It started only this process, as it does without several GPUs (on CPUs it needs MPI).",
            "Start with `torchrun --nproc_per_node=N script.py`; or use --num_processes=1, and unset MASTER_ADDR.",
        )
    engines = _engines_of(strategy) if _name_of(strategy) else {"fsdp", "deepspeed"}
    for variable, engine in _LAUNCHER_ENGINES.items():
        if engine not in engines and is_set(variable):
            raise ConfigError(
                f"The launcher asked for {engine} ({variable}={os.environ[variable]}).",
                f"strategy={engine!r} is not the one that was chosen.",
                "Launch with torchrun, or without that option of accelerate launch.",
            )


# The strategy's options by the fields of both configs.
_OPTIONS = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "fsdp_size": "dp_shard",
    "tp_size": "tp_size",
    "cp_size": "cp_size",
    "sp_size": "cp_size",
    "pp_size": "pp_size",
}
# Fields that ask for what the mesh does not do.
_REFUSED = {
    "ep_size": "Experts cannot be shared out one by one yet: their gradients are not proved.",
    "enable_expert_parallel": "Experts cannot be shared out one by one yet: their gradients are not proved.",
    "fsdp_plan": "The units that are sharded are the model's layers, or those of transformer_layer_cls_to_wrap.",
    "fsdp_cpu_offload": "Offloading is an argument: fsdp='full_shard offload'.",
    "fsdp_mixed_precision": "The precision is an argument: bf16=True.",
}
_HYBRID = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}


def mesh_request(args: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the strategy and options that `parallelism_config`, or the launcher's, selects; None without either.

    Raises:
        ConfigError: It is another object, its sizes contradict each other or the launcher, or it asks for what the
            strategies do not do.
    """
    if is_weightless():  # `hftrain plan` runs the script as one process
        return None
    config = args.parallelism_config
    if config is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate.parallelism_config import ParallelismConfig

        config = ParallelismConfig()
    if config is None:
        return None
    is_distributed = hasattr(config, "fsdp_size") and hasattr(config, "tp_size")
    if not is_distributed and not all(hasattr(config, name) for name in ("dp_replicate_size", "dp_shard_size")):
        reason = f"A {type(config).__name__} is neither accelerate's ParallelismConfig nor a DistributedConfig."
        raise _refusal({}, reason, "Make one: accelerate.ParallelismConfig(dp_shard_size=2).")
    sizes = {name: int(getattr(config, name, 1) or 1) for name in _OPTIONS if hasattr(config, name)}
    for name, reason in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in (None, False, 1):
            raise _refusal({**sizes, name: value}, reason, f"Leave {name} out.")
    if sizes.get("cp_size", 1) > 1 and sizes.get("sp_size", 1) > 1:
        reason = "cp_size and sp_size both split sequences over processes."
        raise _refusal(sizes, reason, "Use cp_size alone; attention is exchanged where the processes divide the heads.")
    options: dict[str, Any] = {}
    for name, size in sizes.items():
        options[_OPTIONS[name]] = max(options.get(_OPTIONS[name], 1), size)
    if any(options.get(name, 1) > 1 for name in ("tp_size", "cp_size", "pp_size")):
        plan = getattr(config, "tp_plan", None)
        if plan == {}:
            reason = "An empty tp_plan splits no layer, and tensor ranks would all compute the same."
            raise _refusal(sizes, reason, "Leave tp_plan out, or tp_size at 1.")
        extra = {
            "plan": None if plan in (None, "auto") else plan,
            "attention": "ulysses" if sizes.get("sp_size", 1) > 1 else None,
            "sequence_parallel": True if getattr(config, "enable_sequence_parallel", False) else None,
        }
        return "mesh", {**options, **{name: value for name, value in extra.items() if value is not None}}
    return _data_parallel(args, sizes, options["dp_replicate"], options["dp_shard"])


def _data_parallel(args: Any, sizes: dict[str, int], replicas: int, shards: int) -> tuple[str, dict[str, Any]] | None:
    if replicas == shards == 1:
        return None
    if replicas * shards != args.world_size:
        reason = f"It describes {replicas * shards} processes, and the launcher started {args.world_size}."
        raise _refusal(sizes, reason, "Start that many, or change the sizes.")
    if shards == 1:
        return "ddp", {}
    words = [str(word) for word in args.fsdp or ()]
    sharding = next((word for word in words if word not in ("offload", "auto_wrap")), "full_shard")
    sharding = {hybrid: name for name, hybrid in _HYBRID.items()}.get(sharding, sharding) if replicas > 1 else sharding
    if sharding not in _HYBRID:
        reason = f"fsdp={sharding!r} splits the model differently from dp_shard_size={shards}."
        raise _refusal(sizes, reason, "Leave one of the two out.")
    if replicas == 1:
        return "fsdp", {"sharding": sharding}
    return "fsdp", {"sharding": _HYBRID[sharding], "shard_size": shards}


def _refusal(sizes: dict[str, Any], reason: str, remedy: str) -> ConfigError:
    return ConfigError("Cannot use this parallelism_config.", reason, remedy, **sizes)


def precision_request(args: Any, precision: str | Precision | None) -> tuple[str, dict[str, Any]]:
    """Return the precision's registry name and options.

    The first that is set decides: the keyword or `fp16`/`bf16`, the launcher, `tf32`. Without any it is fp32.

    Args:
        precision: The `precision=` keyword; None leaves the choice to the arguments and the launcher. An object keeps
            its own options.
    """
    flag = next((name for name in ("fp16", "bf16") if getattr(args, name)), None)
    if args.fp16_opt_level != "O1":
        warn_once("fp16_opt_level has no effect: it was a level of Apex's amp, which is gone.")
    keyword_name = precision.policy.name if isinstance(precision, Precision) else precision
    if args.half_precision_backend in ("cpu_amp", "cuda_amp") and not (flag or str(keyword_name) in ("fp16", "bf16")):
        warn_once(
            f"half_precision_backend={args.half_precision_backend!r} has no effect without fp16=True or bf16=True."
        )
    if keyword_name is not None and flag and keyword_name != flag:
        reason = f"Both choose the numerics, and they differ: {flag} means {flag!r} here."
        raise clash(f"precision={keyword_name!r}", f"{flag}=True", reason)
    explicit_name = keyword_name or flag
    # Set by `accelerate launch --mixed_precision` or its configuration file.
    launcher_name = launched("ACCELERATE_MIXED_PRECISION") or "no"
    if launcher_name != "no" and explicit_name not in (None, launcher_name):
        source = f"{flag}=True" if keyword_name is None else f"precision={keyword_name!r}"
        warn_once(
            f"The launcher's mixed precision has no effect (ACCELERATE_MIXED_PRECISION={launcher_name!r}): {source} "
            "takes precedence. Remove one of the two, or make them agree."
        )
    name = explicit_name or (launcher_name if launcher_name != "no" else "tf32" if args.tf32 else "fp32")
    if args.tf32 is None:
        return name, {}
    matmul = "high" if args.tf32 else "highest"
    preset = precision.policy.matmul if isinstance(precision, Precision) else precisions.resolve(name)[1].get("matmul")
    if preset == matmul:
        return name, {}
    if preset is not None or isinstance(precision, Precision) or not accepts(precisions.resolve(name)[0], "matmul"):
        reason = f"tf32={args.tf32} means matmul={matmul!r}, and this precision has matmul={preset!r}."
        raise clash(f"precision={name!r}", f"tf32={args.tf32}", reason)
    return name, {"matmul": matmul}
