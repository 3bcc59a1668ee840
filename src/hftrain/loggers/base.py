"""What a tracker does, and what it is told of a run."""

from __future__ import annotations

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
    """What a tracker is told when a run starts.

    Attributes:
        name: The run's label (`run_name`).
        output_dir: The run's folder; of a remote one its local mirror.
        logging_dir: Where event files go, if the user says so.
        project: Trackio's project.
        space_id: The Space that Trackio synchronises with.
        bucket_id: The bucket that Trackio's Space keeps its data in.
        static_space_id: The static Space that shows the run once it has ended.
        is_private: Whether what is created there is private.
        hparams: The arguments, as `to_sanitized_dict` returns them.
        model_config: What the model's `config` says.
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
        """The model's settings and the arguments in one dict; the arguments win."""
        return {**self.model_config, **self.hparams}


class Logger:
    """Report one run to a tracker. Derive from it and override `start` and `log`; the rest is optional.

    A logger is built on every process and must import its package in `start` only, which runs on the main process
    alone. What its methods raise is warned of, and never ends a training.

    Attributes:
        name: The name in `report_to`.
        packages: The importable packages it needs.
        replaces: Trackers that ``report_to="all"`` leaves out where it includes this one, which does their work.
        off_switch: The environment variable that switches it off when true, or ``"VARIABLE=value"``.
        artifacts: Which checkpoints to upload: ``"no"``, ``"end"`` (the best or last one) or ``"checkpoint"`` (each).
        run_id: Set by `start`: by which name the run can be continued later; None if it cannot.

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
    artifacts: str = "no"
    run_id: str | None = None

    @classmethod
    def missing_packages(cls) -> list[str]:
        """List the needed packages that are not installed; imports none of them."""
        return [package for package in cls.packages if not _is_installed(package)]

    @classmethod
    def why_off(cls) -> str | None:
        """Tell why this tracker is switched off on this machine; None if it is not."""
        variable, _, value = cls.off_switch.partition("=")
        is_off = os.environ.get(variable, "").lower() == value.lower() if value else variable and is_set(variable)
        return f"{cls.off_switch} is set" if is_off else None

    @classmethod
    def joins_all(cls) -> bool:
        """Tell whether ``report_to="all"`` includes it once it is installed."""
        return True

    def start(self, run: RunFacts) -> None:
        """Open the run (or continue `run.run_id`) and record its settings; called before the first `log`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers, named like ``train/loss`` or ``eval/loss``, at a number of optimizer updates."""

    def log_artifact(self, folder: Path, step: int) -> None:
        """Upload a checkpoint's folder before returning: it may be deleted afterwards."""

    def finish_training(self) -> None:
        """Write out what is buffered; the run stays open for a later evaluation."""

    def close(self) -> None:
        """End the run, unless it was the user's before; safe to call again."""


class RunLogger(Logger):
    """Report through one object, the tracker's run, which `start` opens or joins.

    Attributes:
        end: The method of a run that ends it.
    """

    end: ClassVar[str] = "finish"
    _run: Any = None
    # Not the user's: `close` ends it.
    _is_own = False

    def close(self) -> None:
        """End the run, unless it was the user's before; safe to call again."""
        if self._run is not None and self._is_own:
            getattr(self._run, self.end)()
            self._run = None


def regroup(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Name metrics by the stage they belong to.

    Example:
        >>> regroup({"loss": 1.0, "eval_loss": 2.0, "test_accuracy": 3.0})
        {'train/loss': 1.0, 'eval/loss': 2.0, 'test/accuracy': 3.0}

    Source: the documented integrations.
    """
    renamed = {}
    for name, value in metrics.items():
        stage, _, rest = name.partition("_")
        renamed[f"{stage}/{rest}" if stage in ("eval", "test") and rest else f"train/{name}"] = value
    return renamed


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics, as plain ones; what is left out is warned of once."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if getattr(value, "size", None) == 1 or (callable(getattr(value, "numel", None)) and value.numel() == 1):
            value = value.item()
        if isinstance(value, (bool, int, float)):
            numbers[str(name)] = value
        else:
            warn_once(f"Trackers take numbers; {name!r} is a {type(value).__name__} and is not reported.")
    return numbers


def is_set(variable: str, default: str = "") -> bool:
    """Tell whether an environment variable says yes."""
    value = os.environ.get(variable, default).strip().lower()
    if value not in _TRUE | _FALSE:
        raise ConfigError(f"{variable}={value!r} is set.", "It is neither true nor false.", "Set it to true or false.")
    return value in _TRUE


def artifacts_asked(variable: str, names: Mapping[str, str]) -> str:
    """Return which checkpoints an environment variable asks to upload.

    Args:
        variable: The environment variable; not set means none.
        names: What else than true (the end) and false it may say, and which `Logger.artifacts` that means.
    """
    value = os.environ.get(variable, "").strip().lower()
    known = {**dict.fromkeys(_FALSE, "no"), **dict.fromkeys(_TRUE, "end"), **names}
    if value not in known:
        raise ConfigError(
            f"{variable}={value!r} is set.", "It has no such value.", suggest(value, {"true", "false", *names})
        )
    return known[value]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings on one level, their names joined by dots."""
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
