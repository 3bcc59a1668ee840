"""MLflow on DagsHub, with checkpoints in the DagsHub repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from hftrain.core.errors import ConfigError
from hftrain.loggers.base import RunFacts
from hftrain.loggers.mlflow import MLflowLogger


class DagsHubLogger(MLflowLogger):
    """Report to the MLflow server of a DagsHub repository, as `dagshub.init()` sets it up.

    Environment variables: those of MLflow; MLFLOW_TRACKING_URI must name the repository
    (``https://dagshub.com/owner/name.mlflow``). HF_DAGSHUB_LOG_ARTIFACTS uploads the last checkpoint to the repository,
    HF_DAGSHUB_MODEL_NAME sets its folder there (``"main"``), BRANCH the branch (``"main"``).

    Source: the documented `DagsHubCallback`.
    """

    name = "dagshub"
    packages: ClassVar[tuple[str, ...]] = ("dagshub", "mlflow")
    replaces: ClassVar[tuple[str, ...]] = ("azure_ml", "mlflow")
    uploads = ("HF_DAGSHUB_LOG_ARTIFACTS", {"true": "end"})

    @classmethod
    def joins_all(cls) -> bool:
        """Return whether MLflow is set up to report to DagsHub."""
        return "dagshub" in os.environ.get("MLFLOW_TRACKING_URI", "")

    def start(self, run: RunFacts) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ConfigError(
                "Cannot report to tracker 'dagshub'.",
                "MLFLOW_TRACKING_URI does not say which repository to report to.",
                "Call dagshub.init() before training, or set the variable.",
            )
        super().start(run)

    def log_artifact(self, folder: Path, step: int) -> None:
        """Commit a checkpoint's folder to the repository."""
        from dagshub.upload import Repo

        path = urlsplit(os.environ["MLFLOW_TRACKING_URI"]).path.strip("/").removesuffix(".mlflow")
        owner, name = path.split("/")[-2:]
        repo: Any = Repo(owner=owner, name=name, branch=os.environ.get("BRANCH") or "main")
        directory = repo.directory(f"artifacts/{os.environ.get('HF_DAGSHUB_MODEL_NAME') or 'main'}")
        directory.add_dir(str(folder), commit_message=f"Model of step {step}")
