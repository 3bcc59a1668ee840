"""Which devices, and how many processes share the work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hftrain.arguments.enums import FSDPOption, ShardedDDPOption


@dataclass(kw_only=True, repr=False)
class DeviceArguments:
    """Devices, seeds and determinism. Source: the documented `TrainingArguments`."""

    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU although an accelerator is present."})
    seed: int = field(default=42, metadata={"help": "Seed of every random generator, set when training starts."})
    data_seed: int | None = field(default=None, metadata={"help": "Seed of data samplers; seed if not given."})
    full_determinism: bool = field(
        default=False, metadata={"help": "Force deterministic algorithms; slow, for debugging."}
    )
    tf32: bool | None = field(
        default=None, metadata={"help": "Allow TF32 matrix products; None leaves torch's setting."}
    )
    tpu_num_cores: int | None = field(default=None, metadata={"help": "TPU cores, set by the TPU launcher."})
    mp_parameters: str = field(
        default="", metadata={"help": "SageMaker model-parallel parameters, set by the SageMaker launcher."}
    )
    no_cuda: bool = field(default=False, metadata={"help": "Old name of use_cpu."})
    use_mps_device: bool = field(default=False, metadata={"help": "No longer needed: MPS is chosen by itself."})


@dataclass(kw_only=True, repr=False)
class DistributionArguments:
    """Distributed training and its engines. Source: the documented `TrainingArguments`."""

    local_rank: int = field(default=-1, metadata={"help": "This process's rank on its node, set by the launcher."})
    ddp_backend: str | None = field(
        default=None, metadata={"help": "Communication back-end, such as 'nccl' or 'gloo'."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=None,
        metadata={"help": "Handed to DistributedDataParallel; None is False with gradient checkpointing, else True."},
    )
    ddp_bucket_cap_mb: int | None = field(
        default=None, metadata={"help": "Handed to DistributedDataParallel, in mebibytes."}
    )
    ddp_broadcast_buffers: bool | None = field(
        default=None,
        metadata={"help": "Handed to DistributedDataParallel; None is False with gradient checkpointing, else True."},
    )
    ddp_static_graph: bool | None = field(
        default=None,
        metadata={"help": "static_graph of DistributedDataParallel: every micro-step runs the same operations."},
    )
    ddp_timeout: int = field(default=1800, metadata={"help": "Seconds until a collective operation is given up."})
    fsdp: list[FSDPOption] | str | None = field(
        default="",
        metadata={"help": "Fully sharded data parallel: a sharding, with 'offload' and 'auto_wrap' if wanted."},
    )
    fsdp_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Settings of fully sharded data parallel: a dict, JSON text or a JSON file's path."},
    )
    deepspeed: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "DeepSpeed configuration: a dict, JSON text or a JSON file's path."}
    )
    accelerator_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "How loaders are shared between processes: a dict, JSON text, an AcceleratorConfig, which the "
            "attribute then is, or a JSON file's path, which the Trainer reads."
        },
    )
    parallelism_config: Any = field(default=None, metadata={"help": "accelerate's ParallelismConfig."})
    ray_scope: str | None = field(default="last", metadata={"help": "Which of a trial's results Ray Tune compares."})
    xpu_backend: str | None = field(default=None, metadata={"help": "Old name of ddp_backend."})
    sharded_ddp: list[ShardedDDPOption] | str | None = field(
        default="", metadata={"help": "FairScale's sharding; use fsdp instead."}
    )
    fsdp_min_num_params: int = field(default=0, metadata={"help": "Old form of fsdp_config={'min_num_params': ...}."})
    fsdp_transformer_layer_cls_to_wrap: str | None = field(
        default=None, metadata={"help": "Old form of fsdp_config={'transformer_layer_cls_to_wrap': ...}."}
    )
