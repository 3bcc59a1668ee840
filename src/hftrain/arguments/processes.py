"""How processes share data, and arguments as properties of the current process, as plain values and as text."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from hftrain.arguments.enums import ParallelMode
from hftrain.arguments.fields import ArgumentFields
from hftrain.core.errors import ConfigError, check_known
from hftrain.core.launcher import announce_launch, read_launch
from hftrain.core.log import get_logger, passive_level


@dataclass(slots=True)
class AcceleratorConfig:
    """Settings of `accelerator_config`: how data loaders are split across processes.

    Args:
        split_batches: Split one batch of `per_device_train_batch_size` across the processes.
        dispatch_batches: The first process reads all data and sends the others their part; None: by dataset type.
        even_batches: Give every process the same number of batches.
        use_seedable_sampler: Shuffle depending only on the seed and the epoch.
        non_blocking: Copy batches to the device asynchronously; None leaves the choice to the strategy.
        gradient_accumulation_kwargs: `num_steps` and `sync_each_batch`.
        use_configured_state: Reuse the accelerate state that is already set up.

    Source: the documented `AcceleratorConfig`.

    Example:
        >>> AcceleratorConfig(split_batches=True).to_dict()["split_batches"]
        True
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool | None = None
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Read the settings from a JSON file.

        Raises:
            ConfigError: The file cannot be read or contains an unknown key.

        Source: the documented `AcceleratorConfig.from_json_file`.
        """
        try:
            settings = dict(json.loads(Path(json_file).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Cannot use accelerator_config={os.fspath(json_file)!r}.",
                f"It cannot be read as a JSON file that holds settings: {error}",
                "Give the path of a JSON file, or a dict.",
            ) from error
        return cls.from_settings(settings)

    @classmethod
    def from_settings(cls, config: Any) -> AcceleratorConfig:
        """Build the settings from a mapping or another library's object; None gives the defaults.

        Raises:
            ConfigError: A key is unknown, or the object is a class.
        """
        if isinstance(config, AcceleratorConfig):
            return config
        if isinstance(config, type):
            raise ConfigError(
                f"Cannot use accelerator_config={config.__name__}.",
                "It is a class, and its settings are those of an instance.",
                f"Give {config.__name__}(), or a dict.",
            )
        settings = {} if config is None else dict(config) if isinstance(config, Mapping) else dict(vars(config))
        names = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            problem = f"Cannot use accelerator_config={{{key!r}: ...}}."
            check_known(key, names, problem, "accelerator_config has no such key.")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict. Source: the documented `AcceleratorConfig.to_dict`."""
        return dataclasses.asdict(self)

    def pop(self, key: str, default: Any = None) -> Any:
        """Return a setting and reset it to its default. Source: the documented `AcceleratorConfig.pop`."""
        field = type(self).__dataclass_fields__.get(key)
        if field is None:
            return default
        value = getattr(self, key)
        setattr(self, key, field.default)
        return value


if TYPE_CHECKING:
    import torch


class ArgumentProcesses(ArgumentFields):
    """What the arguments say of the current process, and their values with secrets hidden."""

    @property
    def world_size(self) -> int:
        """Number of processes in the run."""
        return read_launch().world_size

    @property
    def process_index(self) -> int:
        """This process's rank in the run."""
        return read_launch().rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its node."""
        return read_launch().local_rank or 0

    @property
    def device(self) -> torch.device:
        """The device of this process, if each has one; imports torch but allocates nothing on the device."""
        return self._setup_devices

    @property
    def distributed_state(self) -> Any:
        """accelerate's process state, created on first access; connects the processes if several. Collective."""
        from accelerate import PartialState

        announce_launch()
        return PartialState(cpu=self.use_cpu)

    @property
    def _setup_devices(self) -> torch.device:
        """The device, under the name that code for transformers reads or overrides."""
        import torch

        if not self.use_cpu:
            device = torch.accelerator.current_accelerator(check_available=True)
            if device is not None:
                # Modulo, because a launcher may make only one device visible to each process.
                index = self.local_process_index % torch.accelerator.device_count()
                return device if device.type == "mps" else torch.device(device.type, index)
        return torch.device("cpu")

    @property
    def n_gpu(self) -> int:
        """Accelerators that this process computes on; imports torch.

        0 on the CPU; all visible CUDA devices if no launcher started the process (`DataParallel`). A Trainer sets it if
        its strategy uses another number.
        """
        count = vars(self).get("_n_gpu", vars(self).get("_chosen_n_gpu"))
        if count is not None:
            return int(count)
        device = self.device
        if device.type == "cuda" and read_launch().launcher is None:
            import torch

            return max(torch.accelerator.device_count(), 1)
        return 0 if device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """How the run is parallel: several processes, one process with several devices, or neither.

        Source: the documented `TrainingArguments.parallel_mode`.
        """
        if os.environ.get("SM_HP_MP_PARAMETERS", "{}").strip() not in ("", "{}"):
            return ParallelMode.SAGEMAKER_MODEL_PARALLEL
        if '"sagemaker_distributed_dataparallel_enabled":true' in os.getenv("SM_FRAMEWORK_PARAMS", "").replace(" ", ""):
            return ParallelMode.SAGEMAKER_DATA_PARALLEL
        if self.world_size > 1:
            return ParallelMode.DISTRIBUTED
        return ParallelMode.NOT_DISTRIBUTED if self.n_gpu > 1 else ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        """Training samples per process and micro-step."""
        return self.per_device_train_batch_size * max(self.n_gpu, 1) * (self.tpu_num_cores or 1)

    @property
    def eval_batch_size(self) -> int:
        """Evaluation samples per process and batch."""
        return self.per_device_eval_batch_size * max(self.n_gpu, 1) * (self.tpu_num_cores or 1)

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to its device; subclasses may return False."""
        return True

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """The timeout of collective operations."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Whether this process logs at `log_level` rather than at `log_level_replica`."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes the files that only one process must write."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    def get_process_log_level(self) -> int:
        """Return the numeric log level of this process; "passive" is hftrain's own, or transformers' if none is set.

        Source: the documented `TrainingArguments.get_process_log_level`.
        """
        name = self.log_level if self.should_log else self.log_level_replica
        return passive_level() if name == "passive" else int(getattr(logging, name.upper()))

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the optimizer updates of warmup out of `num_training_steps`.

        Source: the documented `TrainingArguments.get_warmup_steps`.
        """
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * (self.warmup_steps or self.warmup_ratio or 0))

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the work on one process first; the others wait and then run it, reading its cached result.

        Collective with several processes: all must enter, and the process group is created if needed. Does nothing in a
            run of one process.

        Args:
            local: The first process of each node goes first; otherwise the first of the run.
            desc: A description of the work, for the debug log.

        Source: the documented `TrainingArguments.main_process_first`.
        """
        if self.world_size <= 1:
            yield
            return
        from accelerate import PartialState

        backend = {} if self.ddp_backend is None else {"backend": self.ddp_backend}
        announce_launch()
        state = PartialState(cpu=self.use_cpu, timeout=self.ddp_timeout_delta, **backend)
        logger, label = get_logger(__name__), f"process {self.process_index}"
        logger.debug("%s: %s, one process first", label, desc)
        with state.local_main_process_first() if local else state.main_process_first():
            yield
        logger.debug("%s: %s is done everywhere it was waited for", label, desc)

    # -- names that other libraries, and code copied from transformers, use ----------------------------------------

    @property
    def _n_gpu(self) -> int:
        """Same as `n_gpu`; a script that sets it to 1 trains on one device."""
        return self.n_gpu

    @_n_gpu.setter
    def _n_gpu(self, number: int) -> None:
        vars(self)["_chosen_n_gpu"] = number

    @property
    def mixed_precision(self) -> str:
        """The precision in the words of accelerate: ``"bf16"``, ``"fp16"`` or ``"no"``."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"

    @property
    def deepspeed_plugin(self) -> Any:
        """accelerate's description of DeepSpeed's settings, which needs DeepSpeed; None without `deepspeed`."""
        if "_deepspeed_plugin" not in vars(self):
            if not self.deepspeed:
                return None
            from accelerate import DeepSpeedPlugin

            vars(self)["_deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=self.deepspeed)
        return vars(self)["_deepspeed_plugin"]

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, value: Any) -> None:
        vars(self)["_deepspeed_plugin"] = value

    # -- plain values and text, with secrets hidden --------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values; each `*_token` that is set is replaced by a placeholder.

        Source: the documented `TrainingArguments.to_dict`.
        """
        names = [field.name for field in dataclasses.fields(self) if field.init]
        values = {name: _to_plain(getattr(self, name)) for name in names}
        secrets = {name: f"<{name.upper()}>" for name in names if name.endswith("_token") and values[name] is not None}
        return values | secrets

    def to_json_string(self) -> str:
        """Return `to_dict()` as JSON text. Source: the documented `TrainingArguments.to_json_string`."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the settings as TensorBoard accepts them: numbers, booleans, text and tensors; others become text.

        Source: the documented `TrainingArguments.to_sanitized_dict`.
        """
        settings = self.to_dict()
        settings |= {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        kinds: tuple[type, ...] = (bool, int, float, str)
        if "torch" in sys.modules:
            kinds += (sys.modules["torch"].Tensor,)
        return {name: value if isinstance(value, kinds) else str(value) for name, value in settings.items()}

    def __str__(self) -> str:
        lines = "".join(f"{name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


def changed_settings(values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return the plain settings that differ from the defaults of a class of arguments.

    Args:
        values: By name, as `to_dict` returns them; names that the class does not have are kept.
    """
    defaults = {field.name: field for field in dataclasses.fields(kind)}

    def is_default(name: str, value: Any) -> bool:
        field = defaults.get(name)
        if field is None:
            return False
        if name == "run_name":
            return bool(value == values.get("output_dir"))
        setting = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = _to_plain(AcceleratorConfig() if name == "accelerator_config" and setting is None else setting)
        # The constructor converts texts to lists, and None to False.
        return bool(value == default or (not value and not default and type(value) in (list, dict, bool, type(None))))

    return {name: value for name, value in values.items() if not is_default(name, value)}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, type):
        return value
    if hasattr(value, "to_dict"):
        return _to_plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
