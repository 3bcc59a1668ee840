"""All documented settings together, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hftrain.arguments.batches import BatchArguments
from hftrain.arguments.data import DataArguments
from hftrain.arguments.devices import DeviceArguments, DistributionArguments
from hftrain.arguments.directories import DirectoryArguments
from hftrain.arguments.evaluation import EvaluationArguments
from hftrain.arguments.hub import HubArguments
from hftrain.arguments.optimization import OptimizationArguments
from hftrain.arguments.precision import PrecisionArguments
from hftrain.arguments.reporting import ReportingArguments
from hftrain.arguments.saving import SavingArguments


# Dataclasses collect fields from the last base to the first: directories come first.
@dataclass(repr=False)
class ArgumentFields(
    HubArguments,
    DataArguments,
    PrecisionArguments,
    DistributionArguments,
    DeviceArguments,
    SavingArguments,
    ReportingArguments,
    OptimizationArguments,
    BatchArguments,
    EvaluationArguments,
    DirectoryArguments,
):
    """Every documented setting, grouped by concern in the bases."""

    # Settings that may be given as JSON text; a subclass's list adds its own to these.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
        "lr_scheduler_kwargs",
        "liger_kernel_config",
    ]
