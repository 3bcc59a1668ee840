"""CodeCarbon."""

from __future__ import annotations

from pathlib import Path

import torch

from hftrain.loggers.base import Logger, RunFacts


class CodeCarbonLogger(Logger):
    """Measure the energy use and emissions of training and write ``emissions.csv`` to the output folder.

    CodeCarbon itself reads CODECARBON_* and ``.codecarbon.config``. It measures from the start to the end of training.

    Source: the documented `CodeCarbonCallback`.
    """

    name = "codecarbon"
    packages = ("codecarbon",)
    end = "stop"

    @classmethod
    def why_off(cls) -> str | None:
        """Return the reason on ROCm, whose GPUs CodeCarbon cannot measure."""
        return "it cannot measure AMD GPUs (ROCm)" if torch.version.hip else None

    def start(self, run: RunFacts) -> None:
        """Start measuring."""
        from codecarbon import EmissionsTracker

        Path(run.output_dir).mkdir(parents=True, exist_ok=True)
        self._run, self._is_own = EmissionsTracker(output_dir=run.output_dir), True
        self._run.start()

    def finish_training(self) -> None:
        """Stop measuring and write the file."""
        self.close()
