"""Arguments as plain values and as text."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from hftrain.arguments.accelerator import AcceleratorConfig
from hftrain.arguments.processes import ArgumentProcesses


class ArgumentSerialization(ArgumentProcesses):
    """Views of the arguments, with secrets hidden."""

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
