"""Comet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.loggers.base import Logger, RunFacts

_ONLINE = {"ONLINE": True, "OFFLINE": False}


class CometLogger(Logger):
    """Report to Comet, in the running experiment if there is one.

    Environment variables: COMET_PROJECT_NAME (``"huggingface"``), COMET_MODE (``"ONLINE"``, ``"OFFLINE"``,
    ``"DISABLED"``), COMET_LOG_ASSETS (upload the last checkpoint); Comet itself reads COMET_START_MODE,
    COMET_START_ONLINE, COMET_EXPERIMENT_KEY, COMET_API_KEY, COMET_OFFLINE_DIRECTORY and its other variables.

    Source: the documented `CometCallback`.
    """

    name = "comet_ml"
    packages = ("comet_ml",)
    off_switch = "COMET_MODE=DISABLED"
    uploads = ("COMET_LOG_ASSETS", {"true": "end"})
    end = "end"

    def start(self, run: RunFacts) -> None:
        """Start, continue or join an experiment; record the settings as parameters."""
        import comet_ml

        running = comet_ml.get_running_experiment()
        self._is_own = running is None
        if running is None:
            options: dict[str, Any] = {"experiment_key": run.run_id} if run.run_id else {}
            if os.environ.get("COMET_MODE", "").upper() in _ONLINE:
                options["online"] = _ONLINE[os.environ["COMET_MODE"].upper()]
            running = comet_ml.start(project_name=os.environ.get("COMET_PROJECT_NAME", "huggingface"), **options)
            running.set_name(run.name)
        self._run = running
        self.run_id = running.get_key()
        running.log_parameters(dict(run.hparams), prefix="args", nested_support=False)
        if run.model_config:
            running.log_parameters(dict(run.model_config), prefix="config", nested_support=False)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log_metrics(dict(metrics), step=step, epoch=metrics.get("train/epoch"))

    def log_image(self, name: str, image: Any, step: int) -> None:
        self._run.log_image(image, name=name, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._run.log_text(text, step=step, metadata={"name": name})

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        """Upload a CSV file."""
        self._run.log_table(f"{name}-{step}.csv", tabular_data=rows, headers=columns)

    def log_artifact(self, folder: Path, step: int) -> None:
        self._run.log_asset_folder(str(folder), step=step, log_file_name=True, recursive=True)
        self._run.flush()

    def finish_training(self) -> None:
        """Wait until pending data is sent."""
        self._run.flush()
