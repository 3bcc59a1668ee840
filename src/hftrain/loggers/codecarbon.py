"""CodeCarbon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hftrain.loggers.base import Logger, RunFacts


class CodeCarbonLogger(Logger):
    """Measure what training uses and emits, and write ``emissions.csv`` to the output folder.

    CodeCarbon itself reads CODECARBON_* and ``.codecarbon.config``. It measures from the start to the end of training.

    Source: the documented `CodeCarbonCallback`.
    """

    name = "codecarbon"
    packages = ("codecarbon",)

    def __init__(self) -> None:
        self._tracker: Any = None

    @classmethod
    def why_off(cls) -> str | None:
        """Name ROCm, whose GPUs CodeCarbon cannot measure."""
        return "it cannot measure AMD GPUs (ROCm)" if torch.version.hip else None

    def start(self, run: RunFacts) -> None:
        """Start to measure."""
        from codecarbon import EmissionsTracker

        Path(run.output_dir).mkdir(parents=True, exist_ok=True)
        self._tracker = EmissionsTracker(output_dir=run.output_dir)
        self._tracker.start()

    def finish_training(self) -> None:
        """Stop measuring and write the file."""
        self.close()

    def close(self) -> None:
        """Stop measuring and write the file."""
        if self._tracker is not None:
            self._tracker.stop()
            self._tracker = None
