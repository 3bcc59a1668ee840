"""Numerics, compilation and what saves memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, repr=False)
class PrecisionArguments:
    """Precision, compilation and memory. Source: the documented `TrainingArguments`."""

    bf16: bool = field(default=False, metadata={"help": "Mixed precision with bfloat16."})
    fp16: bool = field(default=False, metadata={"help": "Mixed precision with float16 and loss scaling."})
    fp16_opt_level: str = field(default="O1", metadata={"help": "Apex's optimization level, O0 to O3; has no effect."})
    half_precision_backend: str = field(
        default="auto",
        metadata={"help": "What implements mixed precision: 'auto', 'cuda_amp' or 'cpu_amp'."},
    )
    use_ipex: bool = field(default=False, metadata={"help": "Intel's extension for PyTorch, discontinued; refused."})
    torch_compile: bool = field(default=False, metadata={"help": "Compile the model with torch.compile."})
    torch_compile_backend: str | None = field(
        default=None, metadata={"help": "torch.compile's back-end; turns torch_compile on."}
    )
    torch_compile_mode: str | None = field(
        default=None, metadata={"help": "torch.compile's mode; turns torch_compile on."}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations in the backward pass to save memory."}
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the model's gradient_checkpointing_enable, a dict or JSON text."}
    )
    activation_checkpointing: bool | None = field(
        default=None, metadata={"help": "Another name of gradient_checkpointing; wins over it."}
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Another name of gradient_checkpointing_kwargs; wins over it."}
    )
    use_cache: bool | None = field(
        default=None,
        metadata={"help": "Set the model's config.use_cache, also for generation; None leaves it as it is."},
    )
    use_liger_kernel: bool | None = field(
        default=False, metadata={"help": "Replace parts of the model by Liger kernels."}
    )
    liger_kernel_config: dict[str, bool] | None = field(
        default=None, metadata={"help": "Which Liger kernels to use, a dict or JSON text."}
    )
    fp16_backend: str = field(default="auto", metadata={"help": "Old name of half_precision_backend."})
    torchdynamo: str | None = field(default=None, metadata={"help": "Old name of torch_compile_backend."})
