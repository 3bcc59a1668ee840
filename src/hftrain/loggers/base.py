"""The tracker interface and the facts it receives about a run."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hftrain.core.errors import ConfigError, suggest
from hftrain.core.log import warn_once

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"", "0", "false", "no", "off", "n", "f", "none"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """The facts that a tracker receives when a run starts.

    Attributes:
        name: The run's label (`run_name`).
        output_dir: The run's folder; for a remote folder, its local mirror.
        logging_dir: The folder of event files, if the user sets one.
        project: Trackio's project.
        space_id: The Space that Trackio synchronises with.
        bucket_id: The bucket that stores the data of Trackio's Space.
        static_space_id: The static Space that shows the run once it has ended.
        is_private: Whether Spaces and buckets are created as private.
        hparams: The arguments, as `to_sanitized_dict` returns them.
        model_config: The settings in the model's `config`.
        model: The unwrapped model.
        log_every: Optimizer updates between two logs.
        run_id: The run to continue; None starts a new one.
        step: Optimizer updates done so far.
    """

    name: str
    output_dir: str = "."
    logging_dir: str | None = None
    project: str = "huggingface"
    space_id: str | None = None
    bucket_id: str | None = None
    static_space_id: str | None = None
    is_private: bool | None = None
    hparams: Mapping[str, Any] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    log_every: int = 500
    run_id: str | None = None
    step: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The model's settings and the arguments in one dict; the arguments take precedence."""
        return {**self.model_config, **self.hparams}


class Logger:
    """Report one run to a tracker. Subclasses override `start` and `log`; the rest is optional.

    A logger is built on every process and must import its package in `start` only, which runs on the main process
    alone. An exception in one of its methods becomes a warning and never ends training.

    Attributes:
        name: The name in `report_to`.
        packages: The importable packages it needs.
        replaces: Trackers that ``report_to="all"`` omits if it includes this one, because this one covers them.
        off_switch: The environment variable that disables it if true, or ``"VARIABLE=value"``.
        uploads: The environment variable that requests uploads of checkpoints, and the `artifacts` of its values.
        end: The method that ends the tracker's run object `_run`; called if `_is_own`, because the logger opened it.
        artifacts: Which checkpoints to upload: ``"no"``, ``"end"`` (the best or last one) or ``"checkpoint"`` (each).
        run_id: Set by `start`: the identifier for continuing the run later; None if it cannot be continued.

    Example:
        >>> class Printer(Logger):
        ...     name = "printer"
        ...
        ...     def log(self, metrics, step):
        ...         print(step, metrics)
        >>> Printer().log({"train/loss": 0.5}, 3)
        3 {'train/loss': 0.5}
    """

    name: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    replaces: ClassVar[tuple[str, ...]] = ()
    off_switch: ClassVar[str] = ""
    uploads: ClassVar[tuple[str, Mapping[str, str]]] = ("", {})
    end: ClassVar[str] = "finish"
    artifacts: str = "no"
    run_id: str | None = None
    _run: Any = None
    _is_own = False

    def __init__(self) -> None:
        if self.uploads[0]:
            self.artifacts = artifacts_asked(*self.uploads)

    @classmethod
    def missing_packages(cls) -> list[str]:
        """List the required packages that are not installed; imports none of them."""
        return [package for package in cls.packages if not _is_installed(package)]

    @classmethod
    def why_off(cls) -> str | None:
        """Return why this tracker is disabled on this machine; None if it is enabled."""
        variable, _, value = cls.off_switch.partition("=")
        is_off = os.environ.get(variable, "").lower() == value.lower() if value else variable and is_set(variable)
        return f"{cls.off_switch} is set" if is_off else None

    @classmethod
    def joins_all(cls) -> bool:
        """Return whether ``report_to="all"`` includes it if it is installed."""
        return True

    def start(self, run: RunFacts) -> None:
        """Open the run (or continue `run.run_id`) and record its settings; called before the first `log`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics, named like ``train/loss`` or ``eval/loss``; `step` counts optimizer updates."""

    def log_image(self, name: str, image: Any, step: int) -> None:
        """Record an array of bytes (height, width, 3 or 4 channels); a tracker that does not override it takes none."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text; see `log_image`."""

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        """Record a table; see `log_image`."""

    def log_artifact(self, folder: Path, step: int) -> None:
        """Upload a checkpoint's folder before returning: it may be deleted afterwards."""

    def finish_training(self) -> None:
        """Flush buffered data; the run stays open for a later evaluation."""

    def close(self) -> None:
        """End the run, unless the user opened it; safe to call again."""
        if self._run is not None and self._is_own:
            getattr(self._run, self.end)()
            self._run = None


class MediaByWrapping(Logger):
    """A logger that logs images, texts and tables as W&B, and others after it, take them: wrapped in a class."""

    def log_image(self, name: str, image: Any, step: int) -> None:
        self.log({name: importlib.import_module(self.packages[0]).Image(image)}, step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.log_table(name, ["text"], [[text]], step)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self.log({name: importlib.import_module(self.packages[0]).Table(columns=columns, data=rows)}, step)


def regroup(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Name metrics by the stage they belong to.

    Example:
        >>> regroup({"loss": 1.0, "eval_loss": 2.0, "test_accuracy": 3.0})
        {'train/loss': 1.0, 'eval/loss': 2.0, 'test/accuracy': 3.0}

    Source: the documented integrations.
    """
    renamed = {}
    for name, value in metrics.items():
        stage, _, metric = name.partition("_")
        renamed[f"{stage}/{metric}" if stage in ("eval", "test") and metric else f"train/{name}"] = value
    return renamed


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics as plain numbers; warn once about the others."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if getattr(value, "size", None) == 1 or (callable(getattr(value, "numel", None)) and value.numel() == 1):
            value = value.item()
        if isinstance(value, (bool, int, float)):
            numbers[str(name)] = value
        else:
            warn_once(f"Trackers take numbers; {name!r} is a {type(value).__name__} and is not reported.")
    return numbers


def is_set(variable: str) -> bool:
    """Return whether an environment variable is true."""
    value = os.environ.get(variable, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ConfigError(f"{variable}={value!r} is set.", "It is neither true nor false.", "Set it to true or false.")
    return value in _TRUE


def artifacts_asked(variable: str, names: Mapping[str, str]) -> str:
    """Return which checkpoints an environment variable requests to upload.

    Args:
        variable: The environment variable; unset means none.
        names: The `Logger.artifacts` of each accepted value other than false; that of ``"true"`` is also that of "1",
            "yes" and "on".
    """
    value = os.environ.get(variable, "").strip().lower()
    choices = {**dict.fromkeys(_FALSE, "no"), **dict.fromkeys(_TRUE, names["true"]), **names}
    if value not in choices:
        raise ConfigError(f"{variable}={value!r} is set.", "It has no such value.", suggest(value, {"false", *names}))
    return choices[value]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dict with dot-joined names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):
        return False
