"""`AcceleratorConfig`: how loaders are split across processes, and other settings of accelerate."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrain.core.errors import ConfigError, check_known


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
