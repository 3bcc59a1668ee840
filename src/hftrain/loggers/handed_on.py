"""Trackers that a callback of transformers reports to: Azure ML, CodeCarbon, DagsHub, Flyte, Kubeflow and Neptune."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from hftrain.core.errors import ConfigError, MissingDependencyError
from hftrain.loggers.base import Logger


class HandedOnTracker(Logger):
    """A tracker whose name is known here, and whose callback is in transformers."""

    def __init__(self) -> None:
        raise ConfigError(
            f"Cannot create a logger for tracker {self.name!r}.",
            "Only transformers' callback reports to it.",
            f"Pass report_to={self.name!r}, or the callback in callbacks=.",
        )

    @classmethod
    def callback_class(cls) -> Any:
        """Return transformers' callback."""
        from transformers.integrations import integration_utils

        callback = integration_utils.INTEGRATION_TO_CALLBACK.get(cls.name)
        if callback is None:
            raise MissingDependencyError(
                f"Cannot report to tracker {cls.name!r}:",
                "the installed transformers has no callback for it.",
                "Run: pip install -U transformers",
            )
        return callback


class AzureMLTracker(HandedOnTracker):
    """The Azure ML run that the script was submitted in."""

    name = "azure_ml"
    packages = ("azureml.core", "transformers")


class CodeCarbonTracker(HandedOnTracker):
    """The energy use and emissions of training, in ``emissions.csv`` of the output folder."""

    name = "codecarbon"
    packages = ("codecarbon", "transformers")

    @classmethod
    def why_off(cls) -> str | None:
        """Return the reason on ROCm, whose GPUs CodeCarbon cannot measure."""
        return "it cannot measure AMD GPUs (ROCm)" if torch.version.hip else None


class DagsHubTracker(HandedOnTracker):
    """The MLflow server of a DagsHub repository, as `dagshub.init()` sets it up."""

    name = "dagshub"
    packages = ("dagshub", "mlflow", "transformers")
    replaces: ClassVar[tuple[str, ...]] = ("azure_ml", "mlflow")

    @classmethod
    def joins_all(cls) -> bool:
        return "dagshub" in os.environ.get("MLFLOW_TRACKING_URI", "")


class FlyteTracker(HandedOnTracker):
    """Checkpoints and the log of a Flyte task."""

    name = "flyte"
    # transformers looks for a module inside `flytekitplugins`, and fails where there is no such package.
    packages = ("flytekit", "flytekitplugins", "transformers")

    @classmethod
    def joins_all(cls) -> bool:
        return "FLYTE_INTERNAL_EXECUTION_ID" in os.environ


class KubeflowTracker(HandedOnTracker):
    """The progress that a Kubeflow TrainJob's server shows."""

    name = "kubeflow"
    packages = ("transformers",)
    off_switch = "DISABLE_KUBEFLOW_INTEGRATION"

    @classmethod
    def why_off(cls) -> str | None:
        url = "KUBEFLOW_TRAINER_SERVER_URL"
        return super().why_off() or (None if os.environ.get(url) else f"{url} is not set, as it is in a TrainJob")


class NeptuneTracker(HandedOnTracker):
    """Neptune, whose service closed in March 2026."""

    name = "neptune"
    packages = ("neptune", "transformers")

    @classmethod
    def joins_all(cls) -> bool:
        """Return False: nothing receives what it sends, unless the user has a server."""
        return False
