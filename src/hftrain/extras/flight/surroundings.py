"""What a run was made with, apart from its arguments: the data and the environment."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from hftrain.data.datasets import has_length, whole_dataset

# Variables that change numbers or who computes them.
_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("TORCH_", "NCCL_", "PYTORCH_", "XLA_")


def data_of(dataset: Any) -> dict[str, Any]:
    """Return what tells a dataset from another: its class, length, and the fingerprint of one of `datasets`."""
    dataset = whole_dataset(dataset)
    return {
        "dataset": type(dataset).__name__,
        "samples": len(dataset) if has_length(dataset) else None,
        "fingerprint": getattr(dataset, "_fingerprint", None),
    }


def environment_of(device: torch.device) -> dict[str, Any]:
    """Return what numbers may depend on besides versions: the device, the threads, variables of the environment."""
    is_named = device.type == "cuda"
    return {
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if is_named else f"{device.type} ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        **{name: value for name, value in sorted(os.environ.items()) if name in _NAMES or name.startswith(_PREFIXES)},
    }
