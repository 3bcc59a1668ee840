"""DVCLive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.loggers.base import Logger, RunFacts


class DVCLiveLogger(Logger):
    """Write metrics, parameters and plots as DVCLive files.

    Environment variables: HF_DVCLIVE_LOG_MODEL: true records the last checkpoint in DVC, ``"all"`` each one.

    Args:
        live: An existing `Live` to use; it is not ended.
        log_model: True or ``"all"``, as the variable; takes precedence over it.
        **kwargs: Passed to `Live`.

    Source: the documented `DVCLiveCallback`.
    """

    name = "dvclive"
    packages = ("dvclive",)
    uploads = ("HF_DVCLIVE_LOG_MODEL", {"true": "end", "all": "checkpoint"})
    end = "end"

    def __init__(self, live: Any = None, log_model: str | bool | None = None, **kwargs: Any) -> None:
        if log_model is None:
            super().__init__()
        else:
            self.artifacts = {"all": "checkpoint", True: "end"}.get(log_model, "no")
        self._run = live
        self._is_own = live is None
        self._options = kwargs

    def start(self, run: RunFacts) -> None:
        """Open the folder, or continue in it after a resume; record the settings as parameters."""
        from dvclive import Live

        if self._is_own:
            self._run = Live(**{"resume": run.run_id is not None, **self._options})
        self.run_id = self._run.dir
        self._run.log_params({name: value for name, value in run.config.items() if value is not None})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.step = step
        for name, value in metrics.items():
            self._run.log_metric(name, value)
        self._run.make_summary()

    def log_image(self, name: str, image: Any, step: int) -> None:
        """Write a PNG of each step."""
        self._run.log_image(f"{name}/{step}.png", image)

    def log_artifact(self, folder: Path, step: int) -> None:
        """Record a checkpoint in DVC, as a copy."""
        self._run.log_artifact(str(folder), name="model", type="model", copy=True)
