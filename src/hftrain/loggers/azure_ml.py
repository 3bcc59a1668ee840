"""Azure Machine Learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.loggers.base import Logger, RunFacts


class AzureMLLogger(Logger):
    """Report to the Azure ML run that the script was submitted in.

    Args:
        azureml_run: An existing run to use; None finds the current one.

    Source: the documented `AzureMLCallback`.
    """

    name = "azure_ml"
    packages = ("azureml.core",)

    def __init__(self, azureml_run: Any = None) -> None:
        self._run = azureml_run

    def start(self, run: RunFacts) -> None:
        """Find the run and tag it with the settings."""
        from azureml.core.run import Run

        if self._run is None:
            self._run = Run.get_context()
        self.run_id = self._run.id
        for name, value in run.hparams.items():
            self._run.tag(name, str(value))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._run.log(name, value, step=step)
