"""SageMaker's own runtimes for distributed training, which are refused: nothing here can drive them."""

from __future__ import annotations

from typing import Any

from hftrain.arguments.enums import ParallelMode
from hftrain.core.errors import ConfigError


def check_sagemaker(args: Any) -> None:
    """Refuse SageMaker's model-parallel and data-parallel runtimes: their processes would each train alone.

    Raises:
        ConfigError: `mp_parameters` or the launcher's environment asks for one of them.
    """
    if (args.mp_parameters or "{}").strip() not in ("", "{}"):
        asked = f"mp_parameters={args.mp_parameters!r} was given."
        runtime, successor = "model-parallel", "fsdp='full_shard' (or deepspeed=...), which splits the model"
    elif args.parallel_mode == ParallelMode.SAGEMAKER_MODEL_PARALLEL:
        asked = "The launcher asked for SageMaker's model parallelism (SM_HP_MP_PARAMETERS)."
        runtime, successor = "model-parallel", "fsdp='full_shard' (or deepspeed=...), which splits the model"
    elif args.parallel_mode == ParallelMode.SAGEMAKER_DATA_PARALLEL:
        asked = "The launcher asked for SageMaker's data parallelism (SM_FRAMEWORK_PARAMS)."
        runtime, successor = "data-parallel", "strategy='ddp'"
    else:
        return
    raise ConfigError(
        asked,
        f"SageMaker's {runtime} runtime (smdistributed) needs a trainer of its own, which this is not.",
        f"Launch with torchrun (distribution={{'torch_distributed': {{'enabled': True}}}}) and use {successor}.",
    )
