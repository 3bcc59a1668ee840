"""DVCLive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.loggers.base import Logger, RunFacts, artifacts_asked


class DVCLiveLogger(Logger):
    """Write metrics, parameters and plots as the files of DVCLive.

    Environment variables: HF_DVCLIVE_LOG_MODEL: true records the last checkpoint in DVC, ``"all"`` each one.

    Args:
        live: A `Live` of your own; it is not ended.
        log_model: As the variable, which it wins over: True or ``"all"``.
        **kwargs: For `Live`.

    Source: the documented `DVCLiveCallback`.
    """

    name = "dvclive"
    packages = ("dvclive",)

    def __init__(self, live: Any = None, log_model: str | bool | None = None, **kwargs: Any) -> None:
        if log_model is None:
            self.artifacts = artifacts_asked("HF_DVCLIVE_LOG_MODEL", {"all": "checkpoint"})
        else:
            self.artifacts = {"all": "checkpoint", True: "end"}.get(log_model, "no")
        self._live = live
        self._is_own = live is None
        self._options = kwargs

    def start(self, run: RunFacts) -> None:
        """Open the folder, going on in it after a resume; record the settings as parameters."""
        from dvclive import Live

        if self._is_own:
            self._live = Live(**{"resume": run.run_id is not None, **self._options})
        self.run_id = self._live.dir
        self._live.log_params({name: value for name, value in run.config.items() if value is not None})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics."""
        self._live.step = step
        for name, value in metrics.items():
            self._live.log_metric(name, value)
        self._live.make_summary()

    def log_artifact(self, folder: Path, step: int) -> None:
        """Record a checkpoint in DVC, as a copy."""
        self._live.log_artifact(str(folder), name="model", type="model", copy=True)

    def close(self) -> None:
        """End the run."""
        if self._is_own and self._live is not None:
            self._live.end()
            self._live = None
