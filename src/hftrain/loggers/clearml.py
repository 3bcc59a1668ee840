"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.loggers.base import Logger, RunFacts


class ClearMLLogger(Logger):
    """Report to ClearML, in the current task if one exists.

    Environment variables: CLEARML_PROJECT (``"HuggingFace Transformers"``), CLEARML_TASK (``"Trainer"``),
    CLEARML_LOG_MODEL (upload each checkpoint); ClearML itself reads CLEARML_OFFLINE_MODE and its other variables.

    Source: the documented `ClearMLCallback`.
    """

    name = "clearml"
    packages = ("clearml",)
    uploads = ("CLEARML_LOG_MODEL", {"true": "checkpoint"})
    end = "close"

    def start(self, run: RunFacts) -> None:
        """Start, continue or join a task; record the settings as its configuration."""
        from clearml import Task

        task: Any = Task.current_task()
        self._is_own = task is None
        if task is None:
            task = Task.init(
                project_name=os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
                task_name=os.environ.get("CLEARML_TASK", "Trainer"),
                # These would send everything twice or upload files that the user did not request.
                auto_connect_frameworks={"tensorboard": False, "pytorch": False},
                reuse_last_task_id=False,
                continue_last_task=run.run_id or False,
            )
        self._run = task
        self.run_id = task.id
        task.connect(dict(run.hparams), name="Args")
        if run.model_config:
            task.connect(dict(run.model_config), name="Model Configuration")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add to one plot per metric, with one line per stage."""
        reporter = self._run.get_logger()
        for name, value in metrics.items():
            stage, _, metric = name.partition("/")
            reporter.report_scalar(title=metric, series=stage, value=value, iteration=step)

    def log_image(self, name: str, image: Any, step: int) -> None:
        self._run.get_logger().report_image(title=name, series=name, iteration=step, image=image)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._run.get_logger().report_text(f"{name} (step {step}): {text}")

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self._run.get_logger().report_table(title=name, series=name, iteration=step, table_plot=[columns, *rows])

    def log_artifact(self, folder: Path, step: int) -> None:
        self._run.upload_artifact(folder.name, artifact_object=str(folder), wait_on_upload=True)

    def finish_training(self) -> None:
        """Wait until pending data is sent."""
        self._run.flush()
